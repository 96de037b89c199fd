"""Accepting connections on a listening socket that several worker processes share.

The supervisor opens the one socket and every worker inherits it, so that no worker's end resets connections which the
kernel had given to it. The price is that whoever wakes first takes a connection, and kept-alive connections stay where
they are: left alone, one worker ends up with most of them. Hence the fairness rule: a worker that has more connections
than another live one steps back for a moment, and takes the connection only if it is still there afterwards.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from headrace.data_plane.gateway.http import HttpFront
from headrace.errors import TooManyConnections

__all__ = ["YIELD_S", "Listener"]

_log = logging.getLogger(__name__)

# Long enough for a worker that is in the middle of a request to come round to its loop, short beside a TCP handshake
# over any network. It bounds what fairness can cost a connection when the other worker is stuck.
YIELD_S: Final = 0.001
# Out of descriptors or memory: the connection stays in the kernel's queue, and asking again at once would spin.
_EXHAUSTED_PAUSE_S: Final = 0.1
# The connection died between its handshake and our accept; the next one is unaffected (accept(2), "Error handling").
_GONE: Final = frozenset(
    (
        *(errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET),
        *(errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH, errno.EPERM),
    )
)


class Listener:
    """Accepts for one worker.

    Args:
        sock: Listening socket, shared with the other workers; made non-blocking.
        front: Gets the connections.
        ssl_context: Makes it HTTPS.
        others: The smallest number of open connections among the other live workers; -1 when there is none. It may call
            `stop`.

    Attributes:
        accepted_total: Connections taken.
        yielded_total: Times that another worker was given the chance.
        exhausted_total: Times that descriptors or memory had run out.

    Concurrency: event loop only. One accept per turn of the loop, so that a burst of connections neither delays the
    requests on the open ones nor lands on one worker.
    """

    def __init__(
        self,
        sock: socket.socket,
        front: HttpFront,
        ssl_context: ssl.SSLContext | None,
        others: Callable[[], int],
    ) -> None:
        self._sock = sock
        self._front = front
        self._ssl_context = ssl_context
        self._others = others
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self.accepted_total = 0
        self.yielded_total = 0
        self.exhausted_total = 0
        sock.setblocking(False)

    @property
    def connections(self) -> int:
        """Open connections of this worker, with those in their TLS handshake; what `others` of a neighbour compares."""
        return self._front.connections + len(self._handshakes)

    @property
    def is_accepting(self) -> bool:
        """Between `start` and `stop`."""
        return self._loop is not None

    def start(self) -> None:
        """Accept from now on, on the running loop. Idempotent."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._sock, self._offered)

    def stop(self) -> None:
        """Accept no more; connections that are open, or in their TLS handshake, go on. The socket stays open and goes
        on collecting connections for the other workers. Idempotent."""
        if self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        else:
            self._loop.remove_reader(self._sock)
        self._loop = None

    def abort(self) -> None:
        """Stop, and end the TLS handshakes under way."""
        self.stop()
        for handshake in self._handshakes:
            handshake.cancel()

    def _offered(self) -> None:
        fewest = self._others()
        if self._loop is None:
            return  # asked, the owner has left the socket to the others
        if 0 <= fewest < self.connections:
            self.yielded_total += 1
            self._pause(YIELD_S)
        else:
            self._accept()

    def _pause(self, seconds: float) -> None:
        """Look away: while the socket is readable and not accepted from, the loop would spin."""
        assert self._loop is not None
        self._loop.remove_reader(self._sock)
        self._timer = self._loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        # Whoever has fewer connections has had its chance; what is still here is taken without asking again.
        assert self._loop is not None
        self._timer = None
        self._loop.add_reader(self._sock, self._offered)
        self._accept()

    def _accept(self) -> None:
        assert self._loop is not None
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError):
            return  # another worker was faster, which is what sharing means
        except OSError as error:
            if error.errno not in _GONE:
                self.exhausted_total += 1
                _log.error("cannot accept connections (%s); trying again in %g s", error, _EXHAUSTED_PAUSE_S)
                self._pause(_EXHAUSTED_PAUSE_S)
            return
        self.accepted_total += 1
        if self._ssl_context is not None and len(self._handshakes) >= self._front.settings.connections_max:
            # The front's bound counts connections that can be told so; these have not yet said a word.
            sock.close()
            self._front.tell_refused(TooManyConnections("too many connections are in their TLS handshake"))
            return
        # Answers are written whole; waiting to fill a segment would only delay them.
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                pass  # it was reset meanwhile; the transport will notice
        sock.setblocking(False)
        handshake = self._loop.create_task(self._connect(self._loop, sock))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._set_up)
        # At once: the neighbours compare before the next connection of a burst is offered.
        self._front.connections_changed()

    def _set_up(self, handshake: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)
        self._front.connections_changed()

    async def _connect(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        """One task per connection, until its protocol has it; a request costs none."""
        try:
            if self._ssl_context is None:
                await loop.connect_accepted_socket(self._front.connection, sock)
            else:
                await loop.connect_accepted_socket(
                    self._front.connection,
                    sock,
                    ssl=self._ssl_context,
                    ssl_handshake_timeout=self._front.settings.header_s_max,
                    ssl_shutdown_timeout=self._front.settings.header_s_max,
                )
        except OSError as error:  # with ssl.SSLError, TimeoutError and resets
            _log.debug("a connection ended before its first byte: %s", error)
            sock.close()
        except BaseException:
            sock.close()
            raise
