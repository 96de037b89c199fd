# /// script
# requires-python = ">=3.11"
# dependencies = ["nvidia-pytriton==0.7.0", "onnxruntime==1.32.0", "numpy==1.26.4"]
# [tool.headrace]
# title = "PyTriton"
# path = "/v2/models/{model}/infer"
# body = "oip"
# variants = ["1 instance", "2 instances"]
# ///
"""PyTriton 0.7.0 (Apache-2.0), which brings NVIDIA's Triton server (C++) and runs a Python function behind it.

Configured after its pages "Binding Configuration", "Decorators" and "Initialization": dynamic batching with its default
wait of 0 µs and batches of up to 64, one instance or one per core, no verbose log. numpy stays below 2, as it demands.
"""

import argparse
import os
import socket
import sysconfig
from collections.abc import Callable

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def make_function(session: onnxruntime.InferenceSession) -> Callable[..., dict[str, np.ndarray]]:
    """One instance of the model."""
    names = [output.name for output in session.get_outputs()]

    @batch
    def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        arrays = session.run(names, inputs)
        # Triton knows no output without a dimension beside the batch.
        return {name: array.reshape(len(array), -1) for name, array in zip(names, arrays, strict=True)}

    return infer


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    for name in ("port", "model", "name", "variant", "folder"):
        parser.add_argument(f"--{name}", required=True)
    wanted = parser.parse_args()
    os.chdir(wanted.folder)
    # Triton's stub must find this very interpreter's library, not the system's of another patch version.
    os.environ["PYTRITON_HOME"] = wanted.folder
    os.environ["LD_LIBRARY_PATH"] = sysconfig.get_config_var("LIBDIR")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = [onnxruntime.InferenceSession(wanted.model, options) for _ in range(int(wanted.variant.split()[0]))]
    inputs, outputs = sessions[0].get_inputs(), sessions[0].get_outputs()
    config = TritonConfig(
        http_address="127.0.0.1", http_port=int(wanted.port), grpc_port=free_port(), metrics_port=free_port(),
        log_verbose=0,
    )  # fmt: skip
    with Triton(config=config) as triton:
        triton.bind(
            model_name=wanted.name,
            infer_func=[make_function(session) for session in sessions],
            inputs=[Tensor(name=each.name, dtype=DTYPES[each.type], shape=tuple(each.shape[1:])) for each in inputs],
            outputs=[Tensor(name=each.name, dtype=DTYPES[each.type], shape=(-1,)) for each in outputs],
            config=ModelConfig(max_batch_size=64),
        )
        triton.serve()


if __name__ == "__main__":
    main()
