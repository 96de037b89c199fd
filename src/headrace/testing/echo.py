"""The yardstick: the least that a Python server can do with a request, on the same parser and the same loop.

An `asyncio.Protocol` on `httptools` and `uvloop` that parses each request and answers fixed bytes. It decodes nothing,
runs no model and writes nothing down, so a real server's rate divided by this one's says what its work costs.
"""

import argparse
import asyncio
import signal
import socket
from pathlib import Path
from typing import cast

import httptools
import uvloop

__all__ = ["Echo", "main"]


class Echo(asyncio.Protocol):
    """One connection; every complete request gets the same answer.

    Args:
        answer: A complete HTTP/1.1 response.
    """

    __slots__ = ("_answer", "_parser", "_transport")

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class does not inherit it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            assert self._transport is not None
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        """Taken and dropped, as are headers and body: a server has to look at them."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `on_url`."""

    def on_body(self, body: bytes) -> None:
        """See `on_url`."""

    def on_message_complete(self) -> None:
        assert self._transport is not None
        self._transport.write(self._answer)


async def _serve(listener: socket.socket, answer: bytes) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: Echo(answer), sock=listener)
    await stop.wait()
    server.close()


def main() -> None:
    """Serve on a loopback port until a signal: `python -m headrace.testing.echo --port 9000 --answer FILE`."""
    parser = argparse.ArgumentParser(description="Answers every HTTP/1.1 request with the bytes of a file.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--answer", type=Path, required=True, help="a complete HTTP/1.1 response")
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", arguments.port), backlog=1024)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(listener, arguments.answer.read_bytes()))


if __name__ == "__main__":
    main()
