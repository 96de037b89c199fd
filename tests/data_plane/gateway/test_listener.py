"""Accepting on a shared socket: balance, stopping, and what to do when descriptors run out."""

import asyncio
import errno
import logging
import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvloop
from http_rig import GET, Client, Recorder, until
from test_http_tls import make_certificate

from headrace.clock import SystemClock
from headrace.config import Settings
from headrace.data_plane.gateway.http import HttpFront, tls_context
from headrace.data_plane.gateway.listener import Listener


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as sock:
        yield sock


def make_front(**settings) -> HttpFront:
    return HttpFront(Settings(**settings), Recorder(), SystemClock())


async def connect(sock: socket.socket) -> Client:
    return Client(*await asyncio.open_connection(*sock.getsockname()))


async def end(*listeners: Listener) -> None:
    for listener in listeners:
        listener.abort()
        listener._front.abort_all()
        await until(lambda listener=listener: listener.connections == 0)


async def test_connections_are_accepted_and_served():
    """A listener hands connections to its front, with Nagle's algorithm off. X5"""
    with listening() as sock:
        front = make_front()
        listener = Listener(sock, front, None, lambda: -1)
        listener.start()
        listener.start()
        client = await connect(sock)
        response = await client.ask(GET)

        assert response.status == 200
        (connection,) = front._connections
        accepted = connection._transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert (listener.accepted_total, listener.yielded_total, listener.connections) == (1, 0, 1)
        await client.close()
        await end(listener)


async def test_a_worker_with_more_connections_steps_back_once_and_then_takes_it():
    """Fairness costs a connection about a millisecond, and nobody waits for a worker that is stuck. X5"""
    with listening() as sock:
        listener = Listener(sock, make_front(), None, lambda: 0)
        listener.start()
        first, second = await connect(sock), None
        await first.ask(GET)
        second = await connect(sock)
        await second.ask(GET)

        assert listener.accepted_total == 2
        assert listener.yielded_total == 1
        await first.close()
        await second.close()
        await end(listener)


async def test_two_workers_on_one_socket_share_the_connections():
    """Connections that come one by one and stay are spread evenly. X5"""
    with listening() as sock:
        listeners: list[Listener] = []
        for i in range(2):
            listener = Listener(sock.dup(), make_front(), None, lambda i=i: listeners[1 - i].connections)
            listeners.append(listener)
        for listener in listeners:
            listener.start()
        clients = []
        for _ in range(40):
            clients.append(await connect(sock))
            await clients[-1].ask(GET)

        assert abs(listeners[0].connections - listeners[1].connections) <= 2
        for client in clients:
            await client.close()
        await end(*listeners)
        for listener in listeners:
            listener._sock.close()


def _worker(sock: socket.socket, counts, index: int) -> None:
    async def serve() -> None:
        others = lambda: min((c for i, c in enumerate(counts) if i != index and c >= 0), default=-1)  # noqa: E731
        listener = Listener(sock, make_front(), None, others)
        listener.start()
        while True:
            counts[index] = listener.connections
            await asyncio.sleep(0.0005)

    uvloop.run(serve())


@pytest.mark.slow
def test_worker_processes_on_one_socket_share_the_connections():
    """Across processes, whose view of one another is half a millisecond old, no worker has twice another's. X5"""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("i", [-1] * 3, lock=False)  # -1: not live yet
    with listening() as sock:
        workers = [context.Process(target=_worker, args=(sock, counts, i), daemon=True) for i in range(3)]
        for worker in workers:
            worker.start()
        while min(counts) < 0:
            time.sleep(0.01)
        clients = []
        for _ in range(60):
            client = socket.create_connection(sock.getsockname())
            client.sendall(GET)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            clients.append(client)
        while sum(shares := list(counts)) < 60:
            time.sleep(0.001)
        for client in clients:
            client.close()
        for worker in workers:
            worker.terminate()
            worker.join()

    assert max(shares) <= 2 * min(shares)


async def test_stopping_leaves_open_connections_and_the_socket_alone():
    """What the kernel queues while this worker is stopped is there for the next one. F6"""
    with listening() as sock:
        listener = Listener(sock, make_front(), None, lambda: -1)
        listener.start()
        kept = await connect(sock)
        await kept.ask(GET)
        listener.stop()
        listener.stop()
        waiting = await connect(sock)
        waiting.send(GET)
        await asyncio.sleep(0.02)

        assert (await kept.ask(GET)).status == 200
        assert listener.accepted_total == 1
        listener.start()
        assert (await waiting.receive()).status == 200
        await kept.close()
        await waiting.close()
        await end(listener)


async def test_stopping_while_stepping_back_accepts_nothing():
    """A stop in the pause of the fairness rule holds. F6"""
    with listening() as sock:
        listener = Listener(sock, make_front(), None, lambda: 0)
        listener.start()
        first = await connect(sock)
        await first.ask(GET)
        second = await connect(sock)
        await until(lambda: listener.yielded_total == 1)
        listener.stop()
        await asyncio.sleep(0.01)

        assert listener.accepted_total == 1
        await first.close()
        await second.close()
        await end(listener)


class FailingSocket:
    """A listening socket whose `accept` fails as told, then works."""

    def __init__(self, sock: socket.socket, errors: list[int]) -> None:
        self._sock, self.errors, self.calls = sock, errors, 0

    def __getattr__(self, name: str):
        return getattr(self._sock, name)

    def accept(self):
        self.calls += 1
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, errno.errorcode[number])
        return self._sock.accept()


@pytest.mark.parametrize(("number", "is_exhausted"), [(errno.EMFILE, True), (errno.ECONNABORTED, False)])
async def test_a_failing_accept_does_not_spin(number, is_exhausted, caplog):
    """Out of descriptors it looks away for a moment and says so; an aborted connection is passed over. F6"""
    with listening() as sock, caplog.at_level(logging.ERROR):
        failing = FailingSocket(sock, [number] * 2)
        listener = Listener(failing, make_front(), None, lambda: -1)
        listener.start()
        client = await connect(sock)
        response = await client.ask(GET)

        assert response.status == 200
        assert failing.calls == 3
        assert listener.exhausted_total == (2 if is_exhausted else 0)
        assert len(caplog.records) == listener.exhausted_total
        await client.close()
        await end(listener)


async def test_connections_in_their_tls_handshake_are_counted_and_can_be_ended(tmp_path):
    """A handshake that never comes holds a connection, so fairness and the end of a drain know of it. F6"""
    cert, key = make_certificate(tmp_path)
    with listening() as sock:
        listener = Listener(sock, make_front(), tls_context(cert, key), lambda: -1)
        listener.start()
        client = await connect(sock)
        await until(lambda: listener.connections == 1)
        assert listener._front.connections == 0
        await end(listener)
        await client.close()


async def test_a_tls_handshake_has_a_time_limit(tmp_path):
    """A caller that connects and says nothing is cut off. F6"""
    cert, key = make_certificate(tmp_path)
    with listening() as sock:
        listener = Listener(sock, make_front(header_s_max=0.1), tls_context(cert, key), lambda: -1)
        listener.start()
        client = await connect(sock)
        await until(lambda: listener.connections == 1)
        await client.rest()
        await until(lambda: listener.connections == 0)
        await client.close()
        await end(listener)


async def test_tls_handshakes_are_bounded_as_connections_are(tmp_path):
    """F6: whoever connects and says nothing is no connection of the front yet, and takes memory all the same."""
    cert, key = make_certificate(tmp_path)
    with listening() as sock:
        front = make_front(connections_max=3)
        listener = Listener(sock, front, tls_context(cert, key), lambda: -1)
        listener.start()
        clients = [await connect(sock) for _ in range(10)]
        await until(lambda: listener.accepted_total == 10)
        is_closed = [await client.rest() == b"" for client in clients[3:]]

        assert [True] * 7 == is_closed
        assert 3 == listener.connections
        assert ["too_many_connections"] * 7 == [error.code for error in front.handler.refusals]
        await end(listener)
        for client in clients:
            await client.close()
