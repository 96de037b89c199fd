"""One HTTP/1.1 connection: bytes in, requests out; answers in, bytes out, in the order of the requests.

This file is long and one thing, the life of a connection: what the transport calls, the pump, and leaving. A request
passes

    data_received → reader.feed (whole requests go to _parsed) → _dispatch → _pipeline → handler.handle(exchange)
                  ↘ reader.read_known: one whole request with a head that was read before, straight to _pipeline
    exchange.send → answer_ready → _flush (ready answers at the head of _pipeline, one write)

`_pump` is the one loop that dispatches, flushes and feeds on, and it never runs inside itself: handlers may answer from
within `handle`, transports may call `pause_writing` from within `write`.
"""

import asyncio
import fcntl
import sys
import termios
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from headrace.data_plane.gateway.http_compression import decompress, decompress_inline
from headrace.data_plane.gateway.http_exchange import CLOSES, KEEPS, KEEPS_10, REFUSES, Exchange, Part, body_bytes
from headrace.data_plane.gateway.http_reader import BODY, HEAD, IDLE, RequestReader
from headrace.data_plane.gateway.http_reply import LENGTH_LINES, error_reply
from headrace.errors import HeadraceError, RequestTimeout, ServerError, TooManyConnections

if TYPE_CHECKING:
    from headrace.data_plane.gateway.http import HttpFront

__all__ = ["LINGER_S", "SLICE_BYTES", "Connection"]

# The reader is fed this much at a time, except inside a body of known length: at 25 bytes for the shortest request, one
# large read holds at most 81 requests beyond the bound on unanswered ones, and those wait undispatched.
SLICE_BYTES: Final = 2048
# After a refusal the connection is read on and thrown away for this long: closing with unread bytes makes the kernel
# send a reset, and a reset can take the reply out of the caller's hands (RFC 9112 §9.6).
LINGER_S: Final = 2.0
# Requests dispatched in one go before the other connections have their turn.
_TURN_REQUESTS: Final = 128
_JOINED_BYTES_MAX: Final = 64 * 1024
_BODILESS: Final = frozenset((204, 304))
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_PERSISTENCE_LINES: Final = {
    KEEPS: b"",
    KEEPS_10: b"connection: keep-alive\r\n",
    CLOSES: b"connection: close\r\n",
    REFUSES: b"connection: close\r\n",
}


class Connection(asyncio.Protocol):
    """One connection of the front.

    **Invariants**: an exchange is in `_parsed`, then in `_pipeline`, then finished, in the order of arrival; only those
    in `_pipeline` have been handed over, at most `pipelined_requests_max` of them; once `_is_deaf`, no byte is parsed.

    Concurrency: event loop only.
    """

    __slots__ = (
        "_backlog",
        "_bound",
        "_bytes_taken",
        "_bytes_written",
        "_is_closed",
        "_is_deaf",
        "_is_pumping",
        "_is_reading",
        "_is_write_paused",
        "_linger_until_s",
        "_parsed",
        "_pipeline",
        "_reader",
        "_since_s",
        "_taken_at_s",
        "_transport",
        "front",
    )

    _transport: asyncio.Transport

    def __init__(self, front: "HttpFront") -> None:
        self.front = front
        self._parsed: deque[Exchange] = deque()
        self._pipeline: deque[Exchange] = deque()
        self._reader = RequestReader(
            self, front.settings, front.clock, self._parsed, front.known_heads, front.held_bodies
        )
        self._backlog: memoryview | None = None  # read, not yet fed
        self._bound = front.settings.pipelined_requests_max
        self._since_s = 0.0  # when the reader's stage began; when idle, when the last answer left
        self._is_deaf = False  # no more is parsed: a refusal, the last request, or the end
        self._is_closed = False
        self._is_pumping = False
        self._is_reading = True
        self._is_write_paused = False
        self._linger_until_s = 0.0
        self._bytes_written = 0
        self._bytes_taken = 0
        self._taken_at_s = 0.0

    # ── What the transport calls ────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from asyncio's
        self._since_s = self._taken_at_s = self.front.now_s()
        if not self.front.admits(self):
            most = self.front.settings.connections_max
            self._refuse(TooManyConnections(f"{most} connections are open, which is the most", retry_after_s=1.0))
            self._pump()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        reader, parsed, pipeline = self._reader, self._parsed, self._pipeline
        is_free = reader.stage == IDLE and not (pipeline or parsed or self._is_write_paused) and self._bound > 1
        if is_free and self._backlog is None:
            exchange = reader.read_known(data)
            if exchange is not None:
                pipeline.append(exchange)
                self.front.hand_over(exchange)
                return
        if self._backlog is not None:
            self._backlog = memoryview(bytes(self._backlog) + data)
        elif len(data) > SLICE_BYTES:
            self._backlog = memoryview(data)
        else:
            error = reader.feed(data)
            if error is not None or reader.stage != IDLE or reader.is_done:
                self._after_feed(error)
            elif is_free and len(parsed) == 1 and parsed[0].special is None:
                # One plain request and nothing before it, as nearly always: straight through, as above. Its answer may
                # be written from within, which is safe because nothing else is under way here.
                exchange = parsed.popleft()
                pipeline.append(exchange)
                self.front.hand_over(exchange)
                return
        self._pump()

    def eof_received(self) -> bool:
        # A caller that has stopped sending has, for this protocol, hung up: its unanswered requests are cancelled. What
        # was answered before is in the transport's buffer, which `close` sends first.
        self._abandon()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._abandon()
        self._is_closed = True
        self.front.forget(self)

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._steer_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._pump()

    # ── The pump ────────────────────────────────────────────────────────────────────────────────────────────────────

    def answer_ready(self, exchange: Exchange) -> None:
        """An answer of this connection is complete; it leaves at once if it is its turn."""
        pipeline = self._pipeline
        if self._is_pumping or pipeline[0] is not exchange:
            return
        if (
            len(pipeline) == 1
            and exchange.persistence == KEEPS
            and exchange.reply_status == 200
            and not self.front.is_retiring
            and self._reader.stage == IDLE
            and exchange.method != "HEAD"
        ):
            # The only answer owed, a plain one: what `_flush` and `_render` come to, without their choices.
            body = exchange.reply_body
            only = body[0] if len(body) == 1 else None
            if type(only) is bytes and len(only) <= _JOINED_BYTES_MAX:
                lines = (self.front.status_lines[200], exchange.reply_head, LENGTH_LINES[len(only)], only)
                answer = b"".join(lines)
                del pipeline[0]
                exchange.connection = None
                self._bytes_written += len(answer)
                self._since_s = self.front.now_s()
                self._transport.write(answer)
            else:
                self._flush()
        else:
            self._flush()
        if not self._is_reading or self._parsed or self._backlog is not None:
            self._pump()

    def _pump(self) -> None:
        """Dispatch what is parsed, write what is ready, parse what is left; until nothing moves.

        Handlers that answer at once do so inside `_dispatch`; because of `_is_pumping` their answers wait for `_flush`,
        which writes them together.
        """
        if self._is_pumping or self._is_closed:
            return
        self._is_pumping = True
        pipeline, bound = self._pipeline, self._bound
        turn = 0
        try:
            while True:
                if self._parsed:
                    turn += self._dispatch()
                if pipeline and pipeline[0].is_ready:
                    self._flush()
                if self._is_closed or self._is_write_paused or len(pipeline) >= bound:
                    break
                if turn >= _TURN_REQUESTS and (self._parsed or self._backlog is not None):
                    self.front.loop.call_soon(self._pump)
                    break
                if not self._parsed:
                    if self._backlog is None:
                        break
                    self._feed_slice(self._backlog)
        finally:
            self._is_pumping = False
        if self._parsed or self._backlog is not None or not self._is_reading or len(pipeline) >= bound:
            self._steer_reading()

    def _dispatch(self) -> int:
        """Hand parsed requests over while the bound allows; returns how many left the queue."""
        parsed, pipeline, front, bound = self._parsed, self._pipeline, self.front, self._bound
        count = ready_bytes = 0
        while parsed and len(pipeline) < bound and not self._is_write_paused and count < _TURN_REQUESTS:
            exchange = parsed.popleft()
            pipeline.append(exchange)
            count += 1
            special = exchange.special
            if special is None:
                front.hand_over(exchange)
            elif isinstance(special, bytes):
                self._decode(exchange, special)
            else:
                self._tell(exchange, special)
            if parsed and exchange.is_ready:
                # Large answers are written before more are made, so that a slow reader is noticed in time.
                ready_bytes += body_bytes(exchange.reply_body)
                if ready_bytes > _JOINED_BYTES_MAX:
                    break
        return count

    def _tell(self, exchange: Exchange, error: HeadraceError) -> None:
        """Answer a request that is never handed over, and have it counted."""
        self.front.tell_refused(error)
        exchange.send(*error_reply(error))

    def _decode(self, exchange: Exchange, coding: bytes) -> None:
        bytes_max = self.front.settings.body_bytes_max
        try:
            body = decompress_inline(exchange.body, coding, bytes_max)
        except HeadraceError as error:
            self._tell(exchange, error)
            return
        if body is None:
            work = partial(decompress, exchange.body, coding, bytes_max)
            self.front.run_aside(work, partial(self._decoded, exchange))
        else:
            exchange.body = body
            self.front.hand_over(exchange)

    def _decoded(self, exchange: Exchange, result: bytes | BaseException) -> None:
        # The place in the pipeline was kept. A caller who left meanwhile was never handed over: nothing to count.
        if exchange.is_gone:
            return
        if isinstance(result, HeadraceError):
            self._tell(exchange, result)
        elif isinstance(result, BaseException):
            self.front.report("a body could not be decompressed", result)
            self._tell(exchange, ServerError("the body could not be decompressed here"))
        else:
            exchange.body = result
            self.front.hand_over(exchange)

    def _flush(self) -> None:
        """Write every answer whose turn it is, in one go."""
        pipeline, front = self._pipeline, self.front
        chunks: list[Part] = []
        persistence = KEEPS
        while pipeline and pipeline[0].is_ready:
            exchange = pipeline.popleft()
            exchange.connection = None
            persistence = exchange.persistence
            if front.is_retiring and persistence < CLOSES and self._is_last():
                # The caller may have more under way, which it will send elsewhere: read it off, then close.
                persistence = REFUSES
            try:
                self._render(exchange, persistence, chunks)
            except Exception:
                self.abort()  # the next answer must not take the place of one that cannot be written
                raise
            if persistence > KEEPS_10:
                break
        if self._is_closed or not chunks:
            return
        if len(chunks) == 1:
            self._bytes_written += len(chunks[0])
            self._transport.write(chunks[0])
        else:
            size_bytes = sum(map(len, chunks))
            self._bytes_written += size_bytes
            # Joining small answers makes one system call, and one TLS record, of them; large bodies are not copied.
            if size_bytes <= _JOINED_BYTES_MAX:
                self._transport.write(b"".join(chunks))
            else:
                self._transport.writelines(chunks)
        if persistence > KEEPS_10:
            self._finish(persistence)
        elif not pipeline:
            if self._reader.stage == IDLE:
                self._since_s = front.now_s()
            elif self._reader.is_continue_due and not self._parsed:
                self._send_continue()

    def _render(self, exchange: Exchange, persistence: int, chunks: list[Part]) -> None:
        status, head, body = exchange.reply_status, exchange.reply_head, exchange.reply_body
        lines = self.front.status_lines[status]
        if persistence:
            lines += _PERSISTENCE_LINES[persistence]
        only = body[0] if len(body) == 1 else None
        if status in _BODILESS:
            chunks.append(b"%b%b\r\n" % (lines, head))
        elif exchange.method == "HEAD":
            chunks.append(lines + head + LENGTH_LINES[body_bytes(body)])
        elif type(only) is bytes and len(only) <= _JOINED_BYTES_MAX:
            chunks.append(b"".join((lines, head, LENGTH_LINES[len(only)], only)))
        else:
            chunks.append(lines + head + LENGTH_LINES[body_bytes(body)])
            chunks.extend(body)

    def _is_last(self) -> bool:
        """Nothing of a further request has been seen on this connection."""
        return not self._pipeline and not self._parsed and self._backlog is None and self._reader.stage == IDLE

    def _send_continue(self) -> None:
        """Tell a caller that waits with its body to send it; after every answer that is owed before."""
        self._reader.is_continue_due = False
        self._since_s = self.front.now_s()  # only now does the body's time limit start
        self._bytes_written += len(_CONTINUE)
        self._transport.write(_CONTINUE)

    def _steer_reading(self) -> None:
        """Read while there is room for requests; a full pipeline or a slow reader stops it. A deaf connection is read
        to notice its end. While reading is stopped an orderly end is not noticed, only a reset is."""
        wants_reading = self._is_deaf or (
            self._backlog is None
            and not self._parsed
            and not self._is_write_paused
            and len(self._pipeline) < self._bound
        )
        if self._is_closed or wants_reading is self._is_reading:
            return
        self._is_reading = wants_reading
        if wants_reading:
            self._since_s = self.front.now_s()  # a half-read request is not blamed for our pause
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # ── Feeding the reader ──────────────────────────────────────────────────────────────────────────────────────────

    def _feed_slice(self, backlog: memoryview) -> None:
        size_bytes = SLICE_BYTES
        if self._reader.stage == BODY:
            size_bytes = max(size_bytes, self._reader.body_left_bytes)
        self._backlog = backlog[size_bytes:] if len(backlog) > size_bytes else None
        self._after_feed(self._reader.feed(backlog[:size_bytes]))

    def _after_feed(self, error: HeadraceError | None) -> None:
        """Act on what the reader met: an error, the last request, or a request that goes on in the next read."""
        reader = self._reader
        if error is not None:
            self._refuse(error)
        elif reader.is_done:
            self._is_deaf = True
            self._backlog = None
        elif reader.stage != IDLE:
            if not reader.is_timed:
                reader.is_timed = True
                self._since_s = self.front.now_s()
            if reader.is_continue_due and not self._pipeline and not self._parsed:
                self._send_continue()

    # ── Leaving ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, error: HeadraceError) -> None:
        """Break off: the reply takes its place behind the answers that are owed, and ends the connection."""
        self._stop_reading()
        self._parsed.append(Exchange(self, "", b"", {}, b"", self.front.now_s(), REFUSES, error))

    def _stop_reading(self) -> None:
        self._is_deaf = True
        self._backlog = None
        self._reader.drop()

    def _finish(self, persistence: int) -> None:
        """The last answer was written: close, but not so early that the caller loses it."""
        self._abandon()
        if persistence == CLOSES:
            self._close()
            return
        self._linger_until_s = self.front.now_s() + LINGER_S
        self._steer_reading()
        if self._transport.can_write_eof():  # not over TLS
            self._transport.write_eof()

    def _close(self) -> None:
        self._is_deaf = self._is_closed = True
        self._transport.close()

    def _abandon(self) -> None:
        """Cancel every request that has no answer. Each callback runs whatever the others do."""
        self._stop_reading()
        self._parsed.clear()
        while self._pipeline:
            callback = self._pipeline.popleft().abandon()
            if callback is not None:
                try:
                    callback()
                except Exception as error:
                    self.front.report("a handler failed to cancel a request", error)

    def close_if_idle(self) -> None:
        """Close unless a request is being received or answered."""
        if not self._is_closed and self._is_last():
            self._close()

    def abort(self) -> None:
        """Close at once; unsent answers are lost."""
        self._is_closed = True
        self._abandon()
        self._transport.abort()

    def check(self, now_s: float) -> None:
        """Apply the time limits. Called about once a second, so that no request needs a timer of its own."""
        settings = self.front.settings
        unsent_bytes = self._transport.get_write_buffer_size()
        taken_bytes = self._bytes_written - unsent_bytes - (self._kernel_bytes() if unsent_bytes else 0)
        if taken_bytes != self._bytes_taken or not unsent_bytes:
            self._bytes_taken, self._taken_at_s = taken_bytes, now_s
        elif now_s - self._taken_at_s > settings.write_s_max:
            self.abort()
            return
        if self._is_closed:
            return
        if self._linger_until_s:
            if now_s >= self._linger_until_s and not unsent_bytes:
                self._close()
            return
        if self._is_deaf or not self._is_reading or self._reader.is_continue_due:
            return
        waited_s = now_s - self._since_s
        if self._reader.stage == HEAD:
            if waited_s > settings.header_s_max:
                self._time_out("the head of the request", settings.header_s_max)
        elif self._reader.stage == BODY:
            if waited_s > settings.body_s_max:
                self._time_out("the body of the request", settings.body_s_max)
        elif not self._pipeline and waited_s > settings.idle_s_max:
            self._close()

    def _kernel_bytes(self) -> int:
        """Bytes that the kernel holds for the caller. Without them a slow reader looks stuck: the kernel takes more
        from us only after a third of its buffer, which may be megabytes, has been acknowledged."""
        sock = self._transport.get_extra_info("socket")
        try:
            answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))  # SIOCOUTQ, tcp(7)
        except (AttributeError, OSError, ValueError):
            return 0  # not TCP, not Linux, or closed meanwhile
        return int.from_bytes(answer, sys.byteorder)

    def _time_out(self, what: str, limit_s: float) -> None:
        self._refuse(RequestTimeout(f"{what} took longer than {limit_s:g} s to arrive"))
        self._pump()
