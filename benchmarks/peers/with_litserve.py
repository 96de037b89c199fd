# /// script
# requires-python = ">=3.11"
# dependencies = ["litserve==0.2.19", "onnxruntime==1.32.0", "numpy==2.4.6", "uvicorn==0.54.0", "fastapi==0.165.0"]
# [tool.headrace]
# title = "LitServe"
# path = "/predict"
# body = "input"
# variants = ["plain", "batching", "fast queue", "fast queue+batching"]
# ///
"""LitServe 0.2.19 (Apache-2.0); installs and runs without torch.

Configured after its pages "Batching", "Autoscaling" and "LitServer" (the class's own text): one worker per core "for
CPU", as many HTTP servers as workers (its default), batches of up to 16 with its default wait of 0, and with and
without `fast_queue`, which it advises above 100 requests/s. Its own route takes and gives plain JSON.
"""

import argparse
import os

import litserve
import numpy as np
import onnxruntime


class Onnx(litserve.LitAPI):
    """One request is one row; a batch is an array of rows."""

    def __init__(self, path: str, **options: object) -> None:
        super().__init__(**options)
        self._path = path
        self._is_batching = self.max_batch_size > 1

    def setup(self, device: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(self._path, options)
        self._input = self._session.get_inputs()[0]
        self._names = [output.name for output in self._session.get_outputs()]

    def decode_request(self, request: dict[str, list]) -> np.ndarray:
        return np.asarray(request["input"], np.float32).reshape(self._input.shape[1:])

    def predict(self, rows: np.ndarray) -> list[np.ndarray]:
        return self._session.run(None, {self._input.name: rows if self._is_batching else rows[None]})

    def unbatch(self, outputs: list[np.ndarray]) -> list[list[np.ndarray]]:
        return list(zip(*outputs, strict=True))

    def encode_response(self, outputs: list[np.ndarray]) -> dict[str, list]:
        return {name: np.ravel(array).tolist() for name, array in zip(self._names, outputs, strict=True)}


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    for name in ("port", "model", "name", "variant", "folder"):
        parser.add_argument(f"--{name}", required=True)
    wanted = parser.parse_args()
    os.chdir(wanted.folder)
    api = Onnx(wanted.model, max_batch_size=16 if wanted.variant.endswith("batching") else 1)
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=os.cpu_count(), fast_queue=wanted.variant.startswith("fast")
    )
    server.run(host="127.0.0.1", port=int(wanted.port), log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    main()
