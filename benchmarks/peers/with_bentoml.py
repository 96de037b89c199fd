# /// script
# requires-python = ">=3.11"
# dependencies = ["bentoml==1.4.40", "onnxruntime==1.32.0", "numpy==2.4.6", "uvicorn==0.54.0", "starlette==1.10.0"]
# [tool.headrace]
# title = "BentoML"
# path = "/predict"
# body = "rows"
# variants = ["plain", "batching"]
# ///
"""BentoML 1.4.40 (Apache-2.0).

Configured after its pages "Adaptive batching", "Parallelize requests handling" and "Configurations": one worker per
core, batches of up to 64, access log off in its favour, usage reports off (nothing leaves this machine). Its own route
takes and gives plain JSON: rows of numbers in, rows of all outputs side by side out, since it splits arrays only.
"""

import argparse
import os
import sys
from pathlib import Path

import bentoml
import numpy as np
import onnxruntime

IS_BATCHING = os.environ.get("BENCH_VARIANT") == "batching"


@bentoml.service(workers=os.cpu_count(), logging={"access": {"enabled": False}})
class Onnx:
    """Runs the file that BENCH_MODEL names."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(os.environ["BENCH_MODEL"], options)
        self._input = self._session.get_inputs()[0]

    @bentoml.api(batchable=IS_BATCHING, max_batch_size=64)
    def predict(self, rows: np.ndarray) -> np.ndarray:
        shaped = np.asarray(rows, np.float32).reshape(-1, *self._input.shape[1:])
        outputs = self._session.run(None, {self._input.name: shaped})
        return np.concatenate([array.reshape(len(shaped), -1) for array in outputs], axis=1)


def main() -> None:
    """Become `bentoml serve`."""
    parser = argparse.ArgumentParser()
    for name in ("port", "model", "name", "variant", "folder"):
        parser.add_argument(f"--{name}", required=True)
    wanted = parser.parse_args()
    os.environ |= {
        "BENCH_MODEL": str(Path(wanted.model).resolve()),
        "BENCH_VARIANT": wanted.variant,
        "BENTOML_HOME": wanted.folder,
        "BENTOML_DO_NOT_TRACK": "True",
    }
    here = str(Path(__file__).parent)
    command = ["serve", "with_bentoml:Onnx", "--working-dir", here, "--host", "127.0.0.1", "--port", wanted.port]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *command])


if __name__ == "__main__":
    main()
