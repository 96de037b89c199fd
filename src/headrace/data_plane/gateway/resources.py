"""The read-only side of the protocol: metadata, health, configuration, repository index. Values only, no I/O.

Source: Open Inference Protocol (KServe V2) and Triton's model configuration and model repository extensions.
"""

from collections.abc import Mapping
from typing import Any

from headrace import __version__
from headrace.data_plane.replicas import Endpoint, Replica
from headrace.tensors import Datatype, TensorSpec

EXTENSIONS = ("binary_tensor_data", "parameters", "statistics", "model_configuration")


def server_metadata() -> dict[str, Any]:
    """`GET /v2`."""
    return {"name": "headrace", "version": __version__, "extensions": EXTENSIONS}


def model_metadata(endpoint: Endpoint, replica: Replica) -> dict[str, Any]:
    """`GET /v2/models/{m}`: shapes carry the batch dimension as -1 when the model is batched."""
    signature = replica.signature
    metadata: dict[str, Any] = {
        "name": endpoint.name,
        "versions": endpoint.versions(),
        "platform": signature.platform,
        "inputs": [_tensor(spec) for spec in signature.inputs],
        "outputs": [_tensor(spec) for spec in signature.outputs],
    }
    if signature.labels:
        metadata["parameters"] = {"labels": signature.labels}
    return metadata


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype.wire, "shape": spec.shape}


def model_configuration(endpoint: Endpoint, replica: Replica) -> dict[str, Any]:
    """`GET /v2/models/{m}/config`: `TYPE_*` names, and dimensions without the batch."""
    is_batched = replica.signature.is_batched
    backend = replica.signature.platform.split("_")[0]

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        kind = "STRING" if spec.datatype is Datatype.BYTES else spec.datatype.wire
        dims = spec.shape[1:] if is_batched else spec.shape
        return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": dims}

    configuration: dict[str, Any] = {
        "name": endpoint.name,
        "platform": replica.signature.platform,
        "backend": backend,
        "version_policy": {"specific": {"versions": [int(v) for v in endpoint.versions() if v.isdigit()]}},
        "max_batch_size": replica.rows_max if is_batched else 0,
        "input": [tensor(spec) for spec in replica.signature.inputs],
        "output": [tensor(spec) for spec in replica.signature.outputs],
        "instance_group": [{"name": endpoint.name, "kind": "KIND_CPU", "count": 1}],
        "parameters": {key: {"string_value": value} for key, value in replica.runtime.facts.items()},
        "model_transaction_policy": {"decoupled": False},
        "response_cache": {"enable": False},
    }
    if is_batched:
        configuration["dynamic_batching"] = {"preferred_batch_size": [], "max_queue_delay_microseconds": 0}
    return configuration


def repository_index(endpoints: Mapping[str, Endpoint], *, only_ready: bool) -> list[dict[str, str]]:
    """`POST /v2/repository/index`: one entry per version."""
    index = []
    for endpoint in endpoints.values():
        for version in endpoint.versions():
            problem = endpoint.problems.get(version)
            if version in endpoint.replicas:
                entry = {"name": endpoint.name, "version": version, "state": "READY"}
                if problem is not None:
                    entry["reason"] = f"its changed artefact was not loaded, the one before stays in service: {problem}"
                index.append(entry)
            elif not only_ready:
                state = "LOADING" if problem is None else "UNAVAILABLE"
                index.append({"name": endpoint.name, "version": version, "state": state, "reason": problem or ""})
    return index
