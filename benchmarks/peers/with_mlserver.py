# /// script
# requires-python = ">=3.11"
# dependencies = ["mlserver==1.7.1", "onnxruntime==1.32.0", "numpy==2.4.6", "uvloop==0.21.0"]
# [tool.headrace]
# title = "MLServer"
# path = "/v2/models/{model}/infer"
# body = "oip"
# variants = ["pool", "pool+batching", "in-process", "in-process+batching"]
# ///
"""MLServer 1.7.1 (Apache-2.0) with an ONNX runtime of our own, since it brings none.

Configured after its pages "Custom Inference Runtimes", "Parallel Inference" and "Adaptive Batching": debug off, one
inference worker per core or, with `parallel_workers` 0, the model in the HTTP process; batching as its page shows it
(up to 64 requests) but with a wait of 1 ms, since its 500 ms example would lose every comparison.
uvloop is held at the version of its time: with 0.22 and newer its inference workers do not start.
"""

import argparse
import json
import os
import socket
import sys
from pathlib import Path

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Onnx(MLModel):
    """Runs the file that the setting `parameters.uri` names."""

    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(self.settings.parameters.uri, options)
        self._outputs = [output.name for output in self._session.get_outputs()]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs = {each.name: NumpyCodec.decode_input(each) for each in payload.inputs}
        arrays = self._session.run(self._outputs, inputs)
        outputs = [NumpyCodec.encode_output(*each) for each in zip(self._outputs, arrays, strict=True)]
        return InferenceResponse(id=payload.id, model_name=self.name, model_version=self.version, outputs=outputs)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Write its two settings files and become `mlserver start`."""
    parser = argparse.ArgumentParser()
    for name in ("port", "model", "name", "variant", "folder"):
        parser.add_argument(f"--{name}", required=True)
    wanted = parser.parse_args()
    is_pool, is_batching = wanted.variant.startswith("pool"), wanted.variant.endswith("batching")
    settings = {
        "debug": False,
        "host": "127.0.0.1",
        "http_port": int(wanted.port),
        "grpc_port": free_port(),
        "metrics_port": free_port(),
        "parallel_workers": os.cpu_count() if is_pool else 0,
    }
    model = {
        "name": wanted.name,
        "implementation": "with_mlserver.Onnx",
        "parameters": {"uri": str(Path(wanted.model).resolve()), "version": "1"},
        "max_batch_size": 64 if is_batching else 0,
        "max_batch_time": 0.001 if is_batching else 0,
    }
    folder = Path(wanted.folder)
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "model-settings.json").write_text(json.dumps(model))
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.chdir(folder)
    os.execv(sys.executable, [sys.executable, "-m", "mlserver.cli.main", "start", str(folder)])


if __name__ == "__main__":
    main()
