"""The admit stage: may this worker take a request at all?"""

from collections.abc import Callable

from headrace.data_plane.replicas import Endpoint
from headrace.errors import RecordsUnavailable, ShuttingDown
from headrace.ports import RecordSink

DRAIN_RETRY_AFTER_S = 1.0
RECORDS_RETRY_AFTER_S = 5.0


class Admission:
    """What the worker takes and holds.

    Attributes:
        is_draining: Nothing new is taken.
        tickets_open: Requests received and not ended.
        on_idle: Called whenever the last open ticket ends while draining.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.tickets_open = 0
        self.on_idle: Callable[[], None] | None = None

    def note_idle(self) -> None:
        if self.is_draining and self.tickets_open == 0 and self.on_idle is not None:
            self.on_idle()


def admit(admission: Admission, endpoint: Endpoint | None, sink: RecordSink) -> None:
    """Refuse what cannot be taken whatever it says.

    Raises:
        ShuttingDown: The worker drains.
        RecordsUnavailable: The endpoint's records are strict and the disk takes none.
    """
    if admission.is_draining:
        raise ShuttingDown("the server is shutting down; send the request again", retry_after_s=DRAIN_RETRY_AFTER_S)
    if endpoint is not None and endpoint.is_strict and not sink.is_writable:
        raise RecordsUnavailable(
            f"endpoint {endpoint.name!r} answers only what it can write down, and its records cannot be written now",
            retry_after_s=RECORDS_RETRY_AFTER_S,
        )
