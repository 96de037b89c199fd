"""Settings of the server: declared once as data, merged from defaults, file, environment and flags.

`SETTINGS` is the one list: the loader, `headrace config explain`, the flags of `headrace serve` and
`docs/reference/settings.md` are made from it. The environment is read here and nowhere else.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

Unit = Literal["", "seconds", "bytes", "requests", "connections", "levels", "threads", "processes"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values in force; one attribute per entry of `SETTINGS`, which documents each."""

    http_host: str = "127.0.0.1"
    http_port: int = 8080
    admin_host: str = "127.0.0.1"
    admin_port: int = 8082
    workers: int = 0
    threads: int = 0
    tls_cert: str = ""
    tls_key: str = ""
    header_bytes_max: int = 16 * 1024
    body_bytes_max: int = 64 * 1024 * 1024
    json_depth_max: int = 100
    connections_max: int = 4096
    pipelined_requests_max: int = 64
    idle_s_max: float = 75.0
    header_s_max: float = 10.0
    body_s_max: float = 60.0
    write_s_max: float = 30.0
    drain_s_max: float = 30.0
    run_s_max: float = 60.0
    memory_bytes_max: int = 0
    records_bytes_max: int = 1024 * 1024 * 1024
    records_flush_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """One documented setting.

    Attributes:
        name: Attribute of `Settings`; `server.<name>` in the file, `HEADRACE_<NAME>` in the environment.
        unit: Of the value.
        least, most: Accepted bounds, inclusive; None when unbounded.
        is_reloadable: Takes effect on reload without a restart.
        help: One sentence.
    """

    name: str
    unit: Unit
    least: float | None
    most: float | None
    is_reloadable: bool
    help: str

    @property
    def default(self) -> Any:
        return getattr(Settings(), self.name)


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("http_host", "", None, None, False, "Address that the data plane listens on; 0.0.0.0 for every interface."),
    Setting("http_port", "", 0, 65535, False, "HTTP port of the data plane; 0 takes a free one."),
    Setting("admin_host", "", None, None, False, "Address of the admin port."),
    Setting("admin_port", "", 0, 65535, False, "Port of metrics, health and administration; 0 takes a free one."),
    Setting("workers", "processes", 0, 256, False, "Worker processes; 0 takes cores ÷ threads."),
    Setting("threads", "threads", 0, 256, False, "Threads that one model run may use; 0 takes cores ÷ workers."),
    Setting("tls_cert", "", None, None, False, "Certificate chain (PEM); with tls_key it turns the HTTP port into HTTPS."),
    Setting("tls_key", "", None, None, False, "Private key (PEM) of tls_cert."),
    Setting("header_bytes_max", "bytes", 1024, 1 << 20, False, "Most bytes of request line and headers; more is 431."),
    Setting("body_bytes_max", "bytes", 1024, 1 << 31, False, "Most bytes of a body, as sent and decompressed; more is 413."),
    Setting("json_depth_max", "levels", 4, 1000, False, "Deepest nesting of a JSON body; deeper is 400."),
    Setting("connections_max", "connections", 1, 1 << 20, False, "Most open connections per worker; more get 503."),
    Setting("pipelined_requests_max", "requests", 1, 10_000, False, "Most unanswered requests on one connection before it is read no further."),
    Setting("idle_s_max", "seconds", 0.1, 86_400, False, "Longest time a kept-alive connection may be silent."),
    Setting("header_s_max", "seconds", 0.1, 3_600, False, "Longest time from a request's first byte to the end of its headers."),
    Setting("body_s_max", "seconds", 0.1, 86_400, False, "Longest time from the end of the headers to the end of the body."),
    Setting("write_s_max", "seconds", 0.1, 86_400, False, "Longest time a reader may take nothing of its answer."),
    Setting("drain_s_max", "seconds", 0, 86_400, False, "Longest time that a stopping worker finishes requests in flight."),
    Setting("run_s_max", "seconds", 0.1, 86_400, False, "Longest time of one model run; a worker stuck longer is replaced."),
    Setting("memory_bytes_max", "bytes", 0, 1 << 50, False, "Resident memory above which a worker is drained and replaced; 0 is no limit."),
    Setting("records_bytes_max", "bytes", 1 << 20, 1 << 50, False, "Disk space that record segments may take per worker; the oldest go first."),
    Setting("records_flush_s", "seconds", 0.001, 10, False, "Longest time a buffered record waits before it is written."),
)
