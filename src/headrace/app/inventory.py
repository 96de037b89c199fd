"""What is served, joined from the desired snapshot and the workers' reports."""

from dataclasses import dataclass

from headrace.app.observe import read_reports
from headrace.control_plane.publish import current
from headrace.home import Home
from headrace.report import ReplicaReport


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """One endpoint.

    Attributes:
        version: The default.
        answering_version: What answers requests that name no version: the default, or the last good one while the
            default cannot be loaded; empty when nothing does.
        state: `ready`, `loading`, `failed`, or `stopped` when no worker runs.
        workers: That have it warm.
        one_row_s: Time of one row; 0 when not measured.
        requests_per_s: Requests of one row that all workers together can keep up with; 0 when not measured.
    """

    endpoint: str
    model: str
    version: str
    answering_version: str
    state: str
    workers: int
    slo: str
    one_row_s: float
    requests_per_s: float
    problem: str


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version of one model."""

    model: str
    version: str
    is_default: bool
    state: str
    digest: str
    path: str


def endpoint_rows(home: Home) -> list[EndpointRow] | None:
    """Every endpoint that shall be served; None when nothing ever was."""
    snapshot = current(home)
    if snapshot is None:
        return None
    rows = []
    for spec in snapshot.endpoints:
        replicas = _replicas(home, spec.name, spec.default_version)
        ready = [replica for replica in replicas if replica.state.value == "ready"]
        rows.append(
            EndpointRow(
                endpoint=spec.name,
                model=spec.model,
                version=spec.default_version,
                answering_version=_answering(home, spec.name),
                state=_state(replicas),
                workers=len(ready),
                slo=str(spec.slo) if spec.slo else "",
                one_row_s=ready[0].base_s + ready[0].per_row_s if ready else 0.0,
                requests_per_s=sum(replica.sustainable_rate for replica in ready),
                problem=next((replica.problem for replica in replicas if replica.problem), ""),
            )
        )
    return rows


def version_rows(home: Home) -> list[VersionRow] | None:
    """Every version that shall be served; None when nothing ever was."""
    snapshot = current(home)
    if snapshot is None:
        return None
    return [
        VersionRow(
            model=spec.name,
            version=version.version,
            is_default=version.version == spec.default_version,
            state=_state(_replicas(home, spec.name, version.version)),
            digest=version.digest,
            path=version.path,
        )
        for spec in snapshot.endpoints
        for version in spec.versions
    ]


def load_problem(home: Home, endpoint: str, version: str) -> str:
    """Why a version that no worker has warm could not be loaded; empty when it is warm or was not tried."""
    replicas = _replicas(home, endpoint, version)
    return next((each.problem for each in replicas if each.problem), "") if _state(replicas) == "failed" else ""


def _answering(home: Home, endpoint: str) -> str:
    return next(
        (
            replica.version
            for report in read_reports(home)
            for replica in report.replicas
            if replica.endpoint == endpoint and replica.is_default and replica.state.value == "ready"
        ),
        "",
    )


def _replicas(home: Home, endpoint: str, version: str) -> list[ReplicaReport]:
    return [
        replica
        for report in read_reports(home)
        for replica in report.replicas
        if (replica.endpoint, replica.version) == (endpoint, version)
    ]


def _state(replicas: list[ReplicaReport]) -> str:
    """The best state that any worker has reached."""
    states = {replica.state.value for replica in replicas}
    for state in ("ready", "warming", "loading", "draining", "failed"):
        if state in states:
            return state
    return "stopped"
