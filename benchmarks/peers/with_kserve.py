# /// script
# requires-python = ">=3.11"
# dependencies = ["kserve==0.21.0", "onnxruntime==1.32.0", "numpy==2.4.6", "uvicorn==0.54.0", "fastapi==0.165.0"]
# [tool.headrace]
# title = "KServe SDK"
# path = "/v2/models/{model}/infer"
# body = "oip"
# variants = ["1 worker", "2 workers"]
# ///
"""KServe's Python SDK 0.21.0 (Apache-2.0), with a custom predictor: it batches in a sidecar, not in the SDK.

Configured after its pages "Python Runtime SDK API" and "Custom Predictor": `workers` as its page has it by default and
one per core, its log line per request off in its favour, gRPC off since nothing is sent there.
"""

import argparse
import os

import onnxruntime
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.utils.numpy_codec import from_np_dtype
from kserve.utils.utils import generate_uuid


class Onnx(Model):
    """Loads at the first request, since its workers get the model object by pickle, which a session cannot take."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name)
        self._path = path
        self._session = None
        self.ready = True

    def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(self._path, options)
        self._outputs = [output.name for output in self._session.get_outputs()]
        return True

    async def predict(self, payload: InferRequest, headers: dict[str, str] | None = None) -> InferResponse:
        if self._session is None:
            self.load()
        arrays = self._session.run(self._outputs, {each.name: each.as_numpy() for each in payload.inputs})
        outputs = []
        for name, array in zip(self._outputs, arrays, strict=True):
            output = InferOutput(name, list(array.shape), from_np_dtype(array.dtype))
            output.set_data_from_numpy(array, binary_data=False)
            outputs.append(output)
        return InferResponse(payload.id or generate_uuid(), self.name, outputs)


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    for name in ("port", "model", "name", "variant", "folder"):
        parser.add_argument(f"--{name}", required=True)
    wanted = parser.parse_args()
    os.chdir(wanted.folder)
    server = ModelServer(
        http_port=int(wanted.port),
        workers=int(wanted.variant.split()[0]),
        enable_grpc=False,
        enable_latency_logging=False,
        access_log_format=None,
    )
    server.start([Onnx(wanted.name, wanted.model)])


if __name__ == "__main__":
    main()
