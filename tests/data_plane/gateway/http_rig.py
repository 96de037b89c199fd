"""An HTTP front on a real socket of 127.0.0.1, with a handler that remembers and a clock that is moved."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.clock import ManualClock
from headrace.config import Settings
from headrace.data_plane.gateway.http import Exchange, HttpFront
from headrace.errors import HeadraceError

JSON = b"content-type: application/json\r\n"
GET = b"GET /v2 HTTP/1.1\r\nhost: h\r\n\r\n"


def post(body: bytes, *headers: bytes, target: bytes = b"/infer", length: bool = True) -> bytes:
    """A POST request."""
    lines = [b"POST %b HTTP/1.1" % target, b"host: h", *headers]
    if length:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Recorder:
    """Keeps every request and refusal; answers at once with `reply`, unless it holds."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.refusals: list[HeadraceError] = []
        self.abandoned: list[Exchange] = []
        self.is_holding = False
        self.reply: Callable[[Exchange], tuple[int, bytes, list[bytes | memoryview]]] = lambda exchange: (
            200,
            JSON,
            [b'{"target":"%b"}' % exchange.target],
        )

    def handle(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        exchange.on_abandoned = lambda: self.abandoned.append(exchange)
        if not self.is_holding:
            self.answer(exchange)

    def answer(self, exchange: Exchange) -> bool:
        return exchange.send(*self.reply(exchange))

    def refused(self, error: HeadraceError) -> None:
        self.refusals.append(error)


@dataclass
class Response:
    """One parsed answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self, has_body: bool = True) -> Response:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        assert len(headers) == len(lines), f"a header is repeated: {lines}"
        length = int(headers.get("content-length", "0")) if has_body else 0
        return Response(int(first.split(" ")[1]), headers, await self.reader.readexactly(length))

    async def ask(self, data: bytes) -> Response:
        self.send(data)
        return await self.receive()

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        return await asyncio.wait_for(self.reader.read(), 5)

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass


@dataclass
class Rig:
    """A front that listens."""

    front: HttpFront
    handler: Recorder
    clock: ManualClock
    port: int
    tls: ssl.SSLContext | None = None
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.tls, server_hostname="localhost" if self.tls else None
        )
        self.clients.append(Client(reader, writer))
        return self.clients[-1]

    async def adopt(self, sock: socket.socket) -> Client:
        """A client on a socket with settings of its own; it reads little ahead."""
        self.clients.append(Client(*await asyncio.open_connection(sock=sock, limit=1 << 14)))
        return self.clients[-1]

    def pass_time(self, seconds: float) -> None:
        """Move the clock on and sweep, as the owner does every second."""
        self.clock.advance(seconds)
        self.front.sweep()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that the other end of a socket brings about."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    server_tls: ssl.SSLContext | None = None, client_tls: ssl.SSLContext | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    handler, clock = Recorder(), ManualClock()
    front = HttpFront(Settings(**settings), handler, clock)
    server = await asyncio.get_running_loop().create_server(front.connection, "127.0.0.1", 0, ssl=server_tls)
    rig = Rig(front, handler, clock, server.sockets[0].getsockname()[1], client_tls)
    try:
        yield rig
    finally:
        for client in rig.clients:
            await client.close()
        front.abort_all()
        server.close()
        await until(lambda: front.connections == 0)
        front.close()
