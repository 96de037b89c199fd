"""The route stage: which replica answers. Pure: endpoint and version in, replica or error out."""

from headrace.data_plane.replicas import Endpoint, Replica
from headrace.errors import ModelLoading, ModelUnavailable, UnknownModel, UnknownVersion

LOADING_RETRY_AFTER_S = 1.0
FAILED_RETRY_AFTER_S = 30.0
"""When a version that could not be loaded is first tried again; sooner nothing will have changed."""


def route(endpoint: Endpoint | None, version: str) -> Replica:
    """Choose the replica of a request.

    Args:
        endpoint: What the URL names; None when nothing has that name.
        version: What the URL names; empty for the default.

    Raises:
        UnknownModel: No such endpoint.
        UnknownVersion: The endpoint has no such version.
        ModelLoading: The version is not warm yet.
        ModelUnavailable: The version could not be loaded.
    """
    if endpoint is None:
        raise UnknownModel("no model of that name is served; GET /v2/models lists what is")
    if not version:
        if endpoint.default is not None:
            return endpoint.default
        version = endpoint.spec.default_version
    else:
        replica = endpoint.replicas.get(version)
        if replica is not None:
            return replica
    if version not in endpoint.versions():
        known = ", ".join(endpoint.versions())
        raise UnknownVersion(f"model {endpoint.name!r} has no version of that number; it has: {known}")
    problem = endpoint.problems.get(version)
    if problem is not None:
        text = f"version {version} of model {endpoint.name!r} could not be loaded: {problem}"
        raise ModelUnavailable(text, retry_after_s=FAILED_RETRY_AFTER_S)
    raise ModelLoading(f"version {version} of model {endpoint.name!r} is loading", retry_after_s=LOADING_RETRY_AFTER_S)
