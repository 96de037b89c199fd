"""The HTTP/1.1 front of a worker: its connections, its limits, its retirement.

    `Connection` (http_connection)    parses, keeps the order of answers, applies the protocol
    `Exchange`   (http_exchange)      one request and its one answer, compressed if asked
    `HttpFront`  (here)               owns all connections, the sweep, the date, the compression threads

It is callback style throughout: a request costs no task, no future and no timer. Served by `listener.Listener`.
"""

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from headrace.clock import Clock
from headrace.config import Settings
from headrace.data_plane.gateway.http_connection import Connection
from headrace.data_plane.gateway.http_exchange import Exchange
from headrace.data_plane.gateway.http_reader import HeldBodies, KnownHeads
from headrace.data_plane.gateway.http_reply import StatusLines, error_reply
from headrace.errors import ConfigError, HeadraceError, ServerError

__all__ = ["Exchange", "HttpFront", "HttpHandler", "error_reply", "tls_context"]

# Connections above the most that are told so (503) and read off for a moment; above these, they are cut.
_REFUSING_MAX: Final = 128
_COMPRESSION_THREADS: Final = 2

Result = TypeVar("Result")


class HttpHandler(Protocol):
    """What stands behind the front."""

    def handle(self, exchange: Exchange) -> None:
        """Take a complete request. Leads to exactly one `exchange.send`, now or later on the event loop."""
        ...

    def refused(self, error: HeadraceError) -> None:
        """Count a request that never became complete, or a connection too many; the caller is told `error`."""
        ...


class Loop(Protocol):
    """The part of the event loop that the front uses."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> object: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object: ...

    def call_exception_handler(self, context: dict[str, Any]) -> None: ...


class HttpFront:
    """All HTTP connections of one worker.

    Args:
        settings: Limits and times.
        handler: Takes the requests.
        clock: Times requests and limits, and makes the date header.
        loop: The running loop when None, looked up at the first connection.

    Attributes:
        connections_changed: Called after every change of `connections`; the owner puts its own there.

    Concurrency: event loop only. The owner calls `sweep` about once a second and `close` at the end.

    Example: `await loop.create_server(front.connection, host, port)`.
    """

    def __init__(self, settings: Settings, handler: HttpHandler, clock: Clock, loop: Loop | None = None) -> None:
        self.settings = settings
        self.handler = handler
        self.clock = clock
        self.now_s = clock.now_s
        self.is_retiring = False
        self.connections_changed: Callable[[], None] = lambda: None
        self.status_lines = StatusLines(clock.unix_s())
        self.known_heads = KnownHeads()
        self.held_bodies = HeldBodies(settings.bodies_bytes_max)
        self._loop = loop
        self._connections: set[Connection] = set()
        self._refusing: set[Connection] = set()
        self._threads: ThreadPoolExecutor | None = None

    # ── For the owner ───────────────────────────────────────────────────────────────────────────────────────────────

    def connection(self) -> Connection:
        """Protocol factory."""
        return Connection(self)

    @property
    def connections(self) -> int:
        """Open connections, without those that are only being told that there are too many."""
        return len(self._connections)

    def sweep(self) -> None:
        """Apply the time limits to every connection and move the date on."""
        self.status_lines.set_date(self.clock.unix_s())
        now_s = self.clock.now_s()
        for connection in (*self._connections, *self._refusing):
            connection.check(now_s)

    def retire(self) -> None:
        """From now on the last answer owed on a connection says `connection: close` and ends it. Silent connections
        stay until their next request or the idle limit; `close_idle` ends them."""
        self.is_retiring = True

    def close_idle(self) -> None:
        """Close every connection on which no request is being received or answered."""
        for connection in tuple(self._connections):
            connection.close_if_idle()

    def abort_all(self) -> None:
        """Close everything at once; unanswered requests are abandoned."""
        for connection in (*self._connections, *self._refusing):
            connection.abort()

    def close(self) -> None:
        """Give the compression threads back. Idempotent; after the last connection."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    # ── For the connections ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def loop(self) -> Loop:
        """The event loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def admits(self, connection: Connection) -> bool:
        """Take a new connection in; False when it is one too many and has to be told."""
        if len(self._connections) < self.settings.connections_max:
            self._connections.add(connection)
            self.connections_changed()
            return True
        self._refusing.add(connection)
        if len(self._refusing) > _REFUSING_MAX:
            # Telling costs memory and a descriptor for a moment, so that is bounded too.
            connection.abort()
        return False

    def forget(self, connection: Connection) -> None:
        """The connection is gone."""
        self._connections.discard(connection)
        self._refusing.discard(connection)
        self.connections_changed()

    def hand_over(self, exchange: Exchange) -> None:
        """Give a request to the handler; one that it drops by an exception is answered here."""
        try:
            self.handler.handle(exchange)
        except Exception as error:
            self.report("the handler failed", error)
            if not exchange.is_sent:
                exchange.send(*error_reply(ServerError("the request failed inside the server")))

    def tell_refused(self, error: HeadraceError) -> None:
        """Have a refusal counted; the caller gets its reply even if counting fails."""
        try:
            self.handler.refused(error)
        except Exception as failure:
            self.report("the handler failed to count a refusal", failure)

    def report(self, message: str, error: BaseException) -> None:
        """Tell the loop's exception handler about an error that nobody is left to catch."""
        self.loop.call_exception_handler({"message": message, "exception": error})

    def run_aside(self, work: Callable[[], Result], done: Callable[[Result | BaseException], None]) -> None:
        """Run something long on the compression threads.

        Args:
            work: Runs on a thread.
            done: Gets the result or the exception, on the event loop.
        """
        loop = self.loop
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_COMPRESSION_THREADS, "headrace-http-compression")

        def run() -> None:
            result: Result | BaseException
            try:
                result = work()
            except Exception as error:
                result = error
            try:
                loop.call_soon_threadsafe(done, result)
            except RuntimeError:
                pass  # the loop has ended, and every caller with it

        self._threads.submit(run)


def tls_context(cert: str, key: str) -> ssl.SSLContext:
    """The TLS settings of the HTTP port: TLS 1.2 or later, HTTP/1.1 only.

    Args:
        cert: Path of the certificate chain, PEM.
        key: Path of its private key, PEM, not encrypted.

    Raises:
        headrace.errors.ConfigError: A file is missing or unreadable, or they do not belong together.
    """
    problems = []
    for setting, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            problems.append(f"{setting}: cannot read {path!r} ({error.strerror}); a PEM file is needed")
    if problems:
        raise ConfigError(problems)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        # Without this OpenSSL would ask on the terminal and hang the start.
        raise ConfigError([f"tls_key: {key!r} is encrypted; a key without a passphrase is needed"])

    try:
        context.load_cert_chain(cert, key, no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            [f"tls_cert, tls_key: {cert!r} and {key!r} are not a certificate chain and its key in PEM form ({error})"]
        ) from error
    return context
