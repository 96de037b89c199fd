"""The HTTP front, one test per rule, over real sockets under uvloop."""

import asyncio
import gc
import gzip
import itertools
import socket
import threading
import time
import tracemalloc
import zlib
from functools import partial

import pytest
from http_rig import GET, JSON, post, serving, until

from headrace.data_plane.gateway.http import error_reply
from headrace.data_plane.gateway.http_compression import chosen_coding
from headrace.data_plane.gateway.http_connection import Connection
from headrace.errors import BadRequest, QueueFull, UnsupportedEncoding
from headrace.testing.fuzz import run


def assert_is_error(response, status: int, code: str) -> None:
    assert response.status == status
    assert response.headers["content-type"] == "application/json"
    assert set(response.json) == {"error", "code"}
    assert response.json["code"] == code


# ── Requests ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_reaches_the_handler_as_it_was_sent():
    """Method, raw target, lower-case headers, body and its length arrive; a repeated header is joined. P1"""
    async with serving() as rig:
        client = await rig.connect()
        await client.ask(post(b"{}", b"X-A: 1", b"x-a:2", b"Content-Type: text/x", target=b"/a%20b?q=%41"))

        (exchange,) = rig.handler.exchanges
        assert exchange.method == "POST"
        assert exchange.target == b"/a%20b?q=%41"
        assert exchange.headers == {
            b"host": b"h",
            b"x-a": b"1, 2",
            b"content-type": b"text/x",
            b"content-length": b"2",
        }
        assert exchange.body == b"{}"
        assert exchange.body_bytes_received == 2


async def test_an_answer_carries_length_and_date_and_keeps_the_connection():
    """An HTTP/1.1 answer needs no connection header to go on. P1"""
    async with serving() as rig:
        client = await rig.connect()
        first = await client.ask(GET)
        second = await client.ask(GET)

        assert first.headers == {
            "date": "Sun, 09 Sep 2001 01:46:40 GMT",
            "content-type": "application/json",
            "content-length": "16",
        }
        assert second.body == b'{"target":"/v2"}'
        assert rig.front.connections == 1


async def test_the_date_moves_with_the_sweep():
    """The date header is made once a second, not per answer. X5"""
    async with serving() as rig:
        client = await rig.connect()
        rig.pass_time(1.0)

        assert (await client.ask(GET)).headers["date"] == "Sun, 09 Sep 2001 01:46:41 GMT"


async def test_chunked_bodies_are_joined_and_trailers_left_out():
    """Chunks, extensions and trailers are read; a trailer cannot pass for a header of this or the next request. P1"""
    async with serving() as rig:
        client = await rig.connect()
        body = b"3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nauthorization: evil\r\nx-t: 1\r\n\r\n"
        await client.ask(post(body, b"transfer-encoding: chunked", length=False))
        await client.ask(GET)

        assert rig.handler.exchanges[0].body == b"abcde"
        assert rig.handler.exchanges[0].body_bytes_received == 5
        assert b"authorization" not in rig.handler.exchanges[0].headers
        assert rig.handler.exchanges[1].headers == {b"host": b"h"}


async def test_an_absolute_target_is_reduced_to_its_path():
    """A proxy's absolute form reaches the same route. P1"""
    async with serving() as rig:
        client = await rig.connect()
        await client.ask(b"GET HTTP://other:80/v2/x?y=1 HTTP/1.1\r\nhost: h\r\n\r\n")
        await client.ask(b"GET http://other HTTP/1.1\r\nhost: h\r\n\r\n")

        assert [exchange.target for exchange in rig.handler.exchanges] == [b"/v2/x?y=1", b"/"]


async def test_a_head_request_gets_the_length_but_no_body():
    """HEAD answers end after their headers. P1"""
    async with serving() as rig:
        client = await rig.connect()
        client.send(b"HEAD /v2 HTTP/1.1\r\nhost: h\r\n\r\n" + GET)
        head = await client.receive(has_body=False)
        get = await client.receive()

        assert head.headers["content-length"] == "16"
        assert get.body == b'{"target":"/v2"}'


async def test_an_answer_without_content_has_no_length():
    """204 carries neither body nor content-length. P1"""
    async with serving() as rig:
        rig.handler.reply = lambda exchange: (204, b"", [b""])
        client = await rig.connect()

        assert "content-length" not in (await client.ask(GET)).headers


async def test_a_body_in_parts_is_measured_in_bytes():
    """A memoryview of floats counts its bytes, not its items, in a small and in a large answer. P1"""
    async with serving() as rig:
        for count in (0, 3, 30_000):
            floats = memoryview(bytearray(8 * count)).cast("d")
            rig.handler.reply = lambda exchange, floats=floats: (200, b"", [b"head", floats])
            client = await rig.connect()
            response = await client.ask(GET)

            assert response.body == b"head" + bytes(8 * count)


async def test_an_answer_that_cannot_be_written_costs_its_caller_a_500():
    """A strided view is refused before it is taken, so that no later answer slips into its place. F6"""
    async with serving() as rig:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        views = iter([memoryview(bytes(8))[::2], b"good"])
        rig.handler.reply = lambda exchange: (200, b"", [next(views)])
        client = await rig.connect()
        client.send(GET * 2)
        first, second = await client.receive(), await client.receive()

        assert_is_error(first, 500, "internal")
        assert second.body == b"good"


async def test_a_second_answer_is_a_programming_error():
    """A request has exactly one answer. P1"""
    async with serving() as rig:
        client = await rig.connect()
        await client.ask(GET)

        with pytest.raises(RuntimeError, match="second answer"):
            rig.handler.answer(rig.handler.exchanges[0])


async def test_a_handler_that_raises_costs_its_caller_a_500_and_nobody_else_anything():
    """A defect in one request is answered as JSON and the connection goes on. F6"""
    async with serving() as rig:
        reports = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
        reply = rig.handler.reply
        rig.handler.reply = lambda exchange: 1 / 0
        client = await rig.connect()
        response = await client.ask(GET)
        rig.handler.reply = reply

        assert_is_error(response, 500, "internal")
        assert "ZeroDivision" not in response.body.decode()
        assert isinstance(reports[0]["exception"], ZeroDivisionError)
        assert (await client.ask(GET)).status == 200


# ── Pipelining ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_pipelined_answers_go_out_in_the_order_of_the_requests():
    """Answers completed out of order are held until it is their turn. P1"""
    async with serving() as rig:
        rig.handler.is_holding = True
        client = await rig.connect()
        client.send(b"".join(GET.replace(b"/v2", b"/%d" % i) for i in range(5)))
        await until(lambda: len(rig.handler.exchanges) == 5)
        for i in (3, 1, 4, 0, 2):
            assert rig.handler.answer(rig.handler.exchanges[i])

        assert [(await client.receive()).json["target"] for _ in range(5)] == ["/0", "/1", "/2", "/3", "/4"]


async def test_one_large_read_of_tiny_requests_is_handed_over_in_bounded_portions():
    """At most pipelined_requests_max requests of a connection are unanswered; the rest waits unread. X5"""
    async with serving(pipelined_requests_max=8) as rig:
        rig.handler.is_holding = True
        client = await rig.connect()
        client.send(GET * 2000)
        await until(lambda: len(rig.handler.exchanges) == 8)
        await asyncio.sleep(0.02)
        assert len(rig.handler.exchanges) == 8
        for exchange in rig.handler.exchanges[:3]:
            rig.handler.answer(exchange)
        await until(lambda: len(rig.handler.exchanges) == 11)
        rig.handler.is_holding = False
        for exchange in rig.handler.exchanges[3:]:
            rig.handler.answer(exchange)
        for _ in range(2000):
            assert (await client.receive()).status == 200

        assert len(rig.handler.exchanges) == 2000


async def test_a_flood_on_one_connection_lets_the_others_have_their_turn():
    """A long pipeline that is answered at once is dispatched in turns of the loop. X5"""
    async with serving(pipelined_requests_max=10_000) as rig:
        at_turn = []
        asyncio.get_running_loop().call_soon(partial(_count_turns, rig.handler.exchanges, at_turn))
        client = await rig.connect()
        client.send(GET * 1000)
        await until(lambda: len(rig.handler.exchanges) == 1000)
        at_turn.append(None)

        steps = [b - a for a, b in itertools.pairwise(at_turn[:-1])]
        assert max(steps) <= 256


def _count_turns(exchanges: list, at_turn: list) -> None:
    if None not in at_turn:
        at_turn.append(len(exchanges))
        asyncio.get_running_loop().call_soon(_count_turns, exchanges, at_turn)


# ── Keep-alive ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_connection_close_is_honoured_and_what_follows_is_ignored():
    """The answer says close, the connection ends, and no request behind it is read. P1"""
    async with serving() as rig:
        client = await rig.connect()
        response = await client.ask(GET.replace(b"host: h", b"host: h\r\nConnection: close") + GET)

        assert response.headers["connection"] == "close"
        assert await client.rest() == b""
        assert len(rig.handler.exchanges) == 1
        assert rig.handler.refusals == []


async def test_http_1_0_closes_unless_it_asks_for_keep_alive():
    """HTTP/1.0 needs no host, and its keep-alive is confirmed. P1"""
    async with serving() as rig:
        client = await rig.connect()
        kept = await client.ask(b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n")
        closed = await client.ask(b"GET / HTTP/1.0\r\n\r\n")

        assert kept.headers["connection"] == "keep-alive"
        assert closed.headers["connection"] == "close"
        assert await client.rest() == b""


async def test_retiring_ends_connections_after_their_next_answer():
    """In a drain every owed answer is given, the last one says close, and silent connections are closed. F6"""
    async with serving() as rig:
        rig.handler.is_holding = True
        busy, silent = await rig.connect(), await rig.connect()
        busy.send(GET + GET)
        await until(lambda: len(rig.handler.exchanges) == 2 and rig.front.connections == 2)
        rig.front.retire()
        rig.front.close_idle()
        assert await silent.rest() == b""
        for exchange in rig.handler.exchanges:
            rig.handler.answer(exchange)
        first, second = await busy.receive(), await busy.receive()

        assert "connection" not in first.headers
        assert second.headers["connection"] == "close"
        assert await busy.rest() == b""
        await busy.close()
        await until(lambda: rig.front.connections == 0)


async def test_abort_all_abandons_what_is_unanswered():
    """The end of a drain's patience closes everything and cancels the requests. F6"""
    async with serving() as rig:
        rig.handler.is_holding = True
        client = await rig.connect()
        client.send(GET)
        await until(lambda: len(rig.handler.exchanges) == 1)
        rig.front.abort_all()

        assert rig.handler.abandoned == rig.handler.exchanges
        assert rig.handler.answer(rig.handler.exchanges[0]) is False
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.receive()


# ── Expect and upgrade ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_caller_that_waits_is_told_to_continue():
    """100 Continue is sent before the body, once. P1"""
    async with serving() as rig:
        client = await rig.connect()
        head, body = post(b"abc", b"Expect: 100-Continue").split(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        interim = await client.receive()
        client.send(body)

        assert interim.status == 100
        assert (await client.receive()).status == 200
        assert rig.handler.exchanges[0].body == b"abc"


async def test_continue_waits_for_the_answers_owed_before_it():
    """An interim answer keeps its place in the pipeline. P1"""
    async with serving() as rig:
        rig.handler.is_holding = True
        client = await rig.connect()
        client.send(GET + post(b"abc", b"expect: 100-continue")[:-3])
        await until(lambda: len(rig.handler.exchanges) == 1)
        await asyncio.sleep(0.02)
        rig.handler.answer(rig.handler.exchanges[0])

        assert [(await client.receive()).status for _ in range(2)] == [200, 100]


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ((b"expect: 100-continue", b"content-length: 5000"), 413, "body_too_large"),
        ((b"expect: 100-continue", b"content-length: 5", b"content-encoding: br"), 415, "unsupported_encoding"),
        ((b"expect: tea", b"content-length: 5"), 417, "expectation_failed"),
    ],
)
async def test_a_request_that_will_be_refused_is_not_told_to_continue(headers, status, code):
    """The refusal comes before the body and ends the connection. S2"""
    async with serving(body_bytes_max=4096) as rig:
        client = await rig.connect()
        response = await client.ask(post(b"", *headers, length=False))

        assert_is_error(response, status, code)
        assert response.headers["connection"] == "close"
        assert await client.rest() == b""
        assert rig.handler.exchanges == []
        assert [error.code for error in rig.handler.refusals] == [code]


async def test_an_upgrade_request_is_an_ordinary_request():
    """What Java's HttpClient sends first is served with its body, and the next request is read as HTTP. P1"""
    async with serving() as rig:
        client = await rig.connect()
        upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB")
        responses = [
            await client.ask(post(b"GET /smuggled HTTP/1.1\r\n\r\n", *upgrade)),
            await client.ask(post(b"3\r\nabc\r\n0\r\n\r\n", *upgrade, b"transfer-encoding: chunked", length=False)),
            await client.ask(GET.replace(b"host: h", b"host: h\r\nConnection: Upgrade\r\nUpgrade: websocket")),
            await client.ask(GET),
        ]

        assert [response.status for response in responses] == [200] * 4
        assert [exchange.body for exchange in rig.handler.exchanges] == [
            b"GET /smuggled HTTP/1.1\r\n\r\n",
            b"abc",
            b"",
            b"",
        ]


# ── Strictness ──────────────────────────────────────────────────────────────────────────────────────────────────────

CL = b"content-length: 3"
TE = b"transfer-encoding: chunked"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(post(b"abc", CL), 400, id="content-length twice, equal"),
        pytest.param(post(b"abc", b"content-length: 4"), 400, id="content-length twice, different"),
        pytest.param(post(b"abc", b"content-length: 3, 3", length=False), 400, id="content-length list"),
        pytest.param(post(b"abc", b"content-length: +3", length=False), 400, id="content-length with a sign"),
        pytest.param(post(b"abc", b"content-length: 0x3", length=False), 400, id="content-length in hexadecimal"),
        pytest.param(post(b"abc", b"content-length:", length=False), 400, id="content-length empty"),
        pytest.param(post(b"abc", b"content-length: " + b"9" * 30, length=False), 400, id="content-length overflow"),
        pytest.param(post(b"0\r\n\r\n", TE), 400, id="transfer-encoding then content-length"),
        pytest.param(post(b"0\r\n\r\n", CL, TE, length=False), 400, id="content-length then transfer-encoding"),
        pytest.param(post(b"0\r\n\r\n", TE, TE, length=False), 400, id="transfer-encoding twice"),
        pytest.param(post(b"", b"transfer-encoding: chunked, gzip", length=False), 400, id="chunked is not last"),
        pytest.param(post(b"", b"transfer-encoding: xchunked", length=False), 501, id="unknown transfer-encoding"),
        pytest.param(post(b"0\r\n\r\n", b"transfer-encoding: gzip, chunked", length=False), 501, id="gzip, chunked"),
        pytest.param(post(b"0\r\n\r\n", TE, length=False).replace(b"/1.1", b"/1.0"), 400, id="chunked in HTTP/1.0"),
        pytest.param(post(b"0x1\r\na\r\n0\r\n\r\n", TE, length=False), 400, id="chunk size 0x1"),
        pytest.param(post(b" 1\r\na\r\n0\r\n\r\n", TE, length=False), 400, id="chunk size after a space"),
        pytest.param(post(b"-1\r\na\r\n0\r\n\r\n", TE, length=False), 400, id="chunk size negative"),
        pytest.param(post(b"f" * 17 + b"\r\na", TE, length=False), 400, id="chunk size overflow"),
        pytest.param(post(b"1\na\r\n0\r\n\r\n", TE, length=False), 400, id="chunk size before a bare LF"),
        pytest.param(post(b"1\r\nab\r\n0\r\n\r\n", TE, length=False), 400, id="chunk longer than its size"),
        pytest.param(b"GET / HTTP/1.1\nhost: h\n\n", 400, id="bare LF"),
        pytest.param(post(b"", b"a: b\nc: d"), 400, id="bare LF in a header"),
        pytest.param(post(b"", b"a: b\rc: d"), 400, id="bare CR in a header"),
        pytest.param(post(b"", b"a: b", b" folded"), 400, id="folded header"),
        pytest.param(post(b"", b"a: \0"), 400, id="NUL in a header"),
        pytest.param(post(b"", b"a : b"), 400, id="space before the colon"),
        pytest.param(post(b"", b": b"), 400, id="nameless header"),
        pytest.param(post(b"", b"host: i"), 400, id="host twice"),
        pytest.param(post(b"", b"authorization: a", b"authorization: b"), 400, id="authorization twice"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET /\0 HTTP/1.1\r\nhost: h\r\n\r\n", 400, id="NUL in the target"),
        pytest.param(b"GET ftp://h/ HTTP/1.1\r\nhost: h\r\n\r\n", 400, id="target with a foreign scheme"),
        pytest.param(b"GET * HTTP/1.1\r\nhost: h\r\n\r\n", 400, id="asterisk without OPTIONS"),
        pytest.param(b"G@T / HTTP/1.1\r\nhost: h\r\n\r\n", 400, id="invalid method"),
        pytest.param(b"BREW / HTTP/1.1\r\nhost: h\r\n\r\n", 400, id="unknown method"),
        pytest.param(b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\nabc", 400, id="CONNECT"),
        pytest.param(b"SOURCE / ICE/1.0\r\n\r\n", 400, id="ICE"),
        pytest.param(b"GET /\r\n\r\n", 400, id="HTTP/0.9"),
        pytest.param(b"GET / HTTP/2.0\r\nhost: h\r\n\r\n", 400, id="HTTP/2.0"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2 preface"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, id="TLS on the plain port"),
    ],
)
async def test_a_malformed_request_is_refused_and_ends_the_connection(request_bytes, status):
    """No ambiguous framing is guessed at: an error in JSON, counted once, and nothing behind it is read. S2"""
    async with serving() as rig:
        client = await rig.connect()
        response = await client.ask(request_bytes + GET)

        assert_is_error(response, status, "not_implemented" if status == 501 else "bad_request")
        assert response.headers["connection"] == "close"
        assert await client.rest() == b""
        assert rig.handler.exchanges == []
        assert len(rig.handler.refusals) == 1


async def test_requests_before_a_malformed_one_are_answered_first():
    """The refusal keeps its place behind the answers that are owed. P1"""
    async with serving() as rig:
        rig.handler.is_holding = True
        client = await rig.connect()
        client.send(GET + GET + b"nonsense\r\n\r\n")
        await until(lambda: len(rig.handler.refusals) == 1)
        for exchange in reversed(rig.handler.exchanges):
            rig.handler.answer(exchange)

        assert [(await client.receive()).status for _ in range(3)] == [200, 200, 400]
        assert await client.rest() == b""


async def test_a_refusal_does_not_echo_the_caller():
    """What a caller sends never comes back in a header. S2"""
    async with serving() as rig:
        client = await rig.connect()
        response = await client.ask(post(b"", b"content-encoding: evil", b"x-evil: 1", target=b"/evil"))

        assert response.status == 415
        assert response.headers["accept-encoding"] == "gzip, deflate"
        assert "evil" not in repr(response)


# ── Limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /" + b"a" * 1100 + b" HTTP/1.1\r\nhost: h\r\n\r\n", id="target"),
        pytest.param(post(b"", b"a: " + b"b" * 1100), id="one header"),
        pytest.param(post(b"", *(b"a%d: b" % i for i in range(200))), id="many headers"),
        pytest.param(post(b"0\r\na: " + b"b" * 1100 + b"\r\n\r\n", TE, length=False), id="trailer"),
        pytest.param(b"GET / HTTP/1.1\r\na: " + b"b" * 6000, id="unfinished header"),
    ],
)
@pytest.mark.parametrize("read_bytes", [100_000, 100])
async def test_a_head_above_the_limit_is_431(head, read_bytes):
    """Request line, headers and trailers are bounded, in one read or in many. S2"""
    async with serving(header_bytes_max=1024) as rig:
        client = await rig.connect()
        for start in range(0, len(head), read_bytes):
            client.send(head[start : start + read_bytes])
            await asyncio.sleep(0)
        response = await client.receive()

        assert_is_error(response, 431, "header_too_large")


async def test_a_head_at_the_limit_passes():
    """The limit is inclusive. S2"""
    async with serving(header_bytes_max=1024) as rig:
        client = await rig.connect()
        head = b"GET / HTTP/1.1\r\nhost: h\r\na: %b\r\n\r\n"

        assert (await client.ask(head % (b"b" * (1024 - len(head) + 2)))).status == 200


async def test_a_body_above_the_limit_is_413_before_it_is_read():
    """A stated length is enough to refuse. S2"""
    async with serving(body_bytes_max=4096) as rig:
        client = await rig.connect()

        assert (await client.ask(post(b"a" * 4096))).status == 200
        assert_is_error(await client.ask(post(b"", b"content-length: 4097", length=False)), 413, "body_too_large")


async def test_bodies_that_are_begun_and_never_ended_take_bounded_memory():
    """However many connections begin one: the one too many is refused, and the others go on. F6"""
    async with serving(body_bytes_max=4096, bodies_bytes_max=8192) as rig:
        begun = [await rig.connect() for _ in range(3)]
        for client in begun[:2]:
            client.send(post(b"", b"content-length: 4000", length=False) + b"a" * 3000)
        await until(lambda: rig.front.held_bodies.held_bytes == 6000)
        begun[2].send(post(b"", b"content-length: 4000", length=False) + b"a" * 3000)

        assert_is_error(await begun[2].receive(), 503, "bodies_full")
        assert rig.front.held_bodies.held_bytes == 6000

        begun[0].send(b"a" * 1000)
        assert (await begun[0].receive()).status == 200
        assert rig.front.held_bodies.held_bytes == 3000

        await begun[1].close()
        await until(lambda: rig.front.held_bodies.held_bytes == 0)


async def test_a_chunked_body_above_the_limit_is_413():
    """Without a stated length the bytes are counted. S2"""
    async with serving(body_bytes_max=4096) as rig:
        client = await rig.connect()
        client.send(post(b"", TE, length=False))
        for _ in range(5):
            client.send(b"400\r\n" + b"a" * 0x400 + b"\r\n")

        assert_is_error(await client.receive(), 413, "body_too_large")


async def test_the_reply_to_a_refused_upload_survives_the_rest_of_the_upload():
    """The connection is read off before it is closed, so that no reset takes the reply away. S2"""
    async with serving(body_bytes_max=4096) as rig:
        client = await rig.connect()
        client.send(post(b"a" * 4_000_000))
        await client.writer.drain()
        await asyncio.sleep(0.05)

        assert_is_error(await client.receive(), 413, "body_too_large")
        assert await client.rest() == b""


async def test_endless_chunk_extensions_are_refused():
    """Padding that is no body is bounded too. S2"""
    async with serving(header_bytes_max=1024) as rig:
        client = await rig.connect()
        client.send(post(b"1;", TE, length=False))
        for _ in range(10):
            client.send(b"a" * 1000)
            await asyncio.sleep(0.001)

        assert_is_error(await client.receive(), 400, "bad_request")


async def test_a_body_of_one_byte_chunks_takes_no_more_memory_than_its_size_warrants():
    """A list of one-byte pieces would take forty times what was sent. S2"""
    chunks = b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n"
    async with serving() as rig:
        client = await rig.connect()
        tracemalloc.start()
        response = await client.ask(post(chunks, TE, length=False))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert response.status == 200
        assert rig.handler.exchanges[0].body == b"a" * 100_000
        assert peak < 4 * len(chunks)


async def test_a_connection_too_many_is_told_so():
    """503 with Retry-After, and its place is free again when another leaves. F6"""
    async with serving(connections_max=1) as rig:
        first, second = await rig.connect(), None
        await first.ask(GET)
        second = await rig.connect()
        response = await second.receive()

        assert_is_error(response, 503, "too_many_connections")
        assert response.headers["retry-after"] == "1"
        assert await second.rest() == b""
        assert rig.front.connections == 1
        await first.close()
        await until(lambda: rig.front.connections == 0)
        assert (await (await rig.connect()).ask(GET)).status == 200


# ── Time limits ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_silent_connection_is_closed_without_a_word():
    """The idle limit applies before the first request and between requests. F6"""
    async with serving(idle_s_max=10.0) as rig:
        fresh, kept = await rig.connect(), await rig.connect()
        await until(lambda: rig.front.connections == 2)
        rig.pass_time(8.0)
        await kept.ask(GET)
        rig.pass_time(8.0)

        assert await fresh.rest() == b""
        assert rig.front.connections == 1
        rig.pass_time(8.0)
        assert await kept.rest() == b""
        assert rig.handler.refusals == []


@pytest.mark.parametrize(
    ("start", "limit"),
    [(b"G", "header_s_max"), (GET[:-2], "header_s_max"), (post(b"abc")[:-1], "body_s_max")],
)
async def test_a_request_that_does_not_arrive_in_time_is_408(start, limit):
    """Slow-loris: the limit runs from the first byte, whatever trickles in. F6"""
    async with serving(header_s_max=30.0, body_s_max=30.0) as rig:
        rig.front.settings = type(rig.front.settings)(**{limit: 5.0})
        client = await rig.connect()
        client.send(start)
        await asyncio.sleep(0.02)
        rig.pass_time(4.0)
        assert rig.handler.refusals == []
        rig.pass_time(2.0)

        assert_is_error(await client.receive(), 408, "request_timeout")
        assert await client.rest() == b""


async def test_an_unanswered_request_is_not_idle():
    """A long model run outlives the idle limit. F6"""
    async with serving(idle_s_max=1.0, header_s_max=1.0, body_s_max=1.0) as rig:
        rig.handler.is_holding = True
        client = await rig.connect()
        client.send(GET)
        await until(lambda: len(rig.handler.exchanges) == 1)
        rig.pass_time(100.0)
        rig.handler.answer(rig.handler.exchanges[0])

        assert (await client.receive()).status == 200


async def test_a_reader_that_takes_nothing_is_cut_off():
    """A slow reader stops being read from, and after write_s_max it is aborted. F6"""
    async with serving(write_s_max=5.0) as rig:
        rig.handler.reply = lambda exchange: (200, b"", [bytes(1 << 20)])
        sock = socket.create_connection(("127.0.0.1", rig.port))
        sock.sendall(GET * 64)
        await until(lambda: len(rig.handler.exchanges) > 0)
        await asyncio.sleep(0.1)
        handled = len(rig.handler.exchanges)
        assert handled < 64
        rig.pass_time(3.0)
        rig.pass_time(3.0)
        assert rig.front.connections == 1
        rig.pass_time(3.0)
        await until(lambda: rig.front.connections == 0)
        sock.close()


async def test_a_slow_reader_that_keeps_taking_is_served():
    """Progress, however slow, resets the limit. F6"""
    async with serving(write_s_max=5.0) as rig:
        rig.handler.reply = lambda exchange: (200, b"", [bytes(8 << 20)])
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.connect(("127.0.0.1", rig.port))
        client = await rig.adopt(sock)
        client.send(GET)
        taken = 0
        while taken < 8_000_000:
            taken += len(await client.reader.readexactly(400_000))
            await asyncio.sleep(0.005)
            rig.pass_time(4.0)

        assert rig.front.connections == 1


async def test_a_kept_silent_refusal_is_closed_in_the_end():
    """A refused caller that does not hang up is not kept for ever. F6"""
    async with serving() as rig:
        client = await rig.connect()
        client.send(b"nonsense\r\n\r\n")
        await client.receive()
        assert rig.front.connections == 1
        rig.pass_time(3.0)

        await until(lambda: rig.front.connections == 0)


# ── Callers who leave ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_half", [True, False], ids=["half-closed", "reset"])
async def test_a_caller_who_leaves_cancels_its_unanswered_requests(is_half):
    """Each on_abandoned is called once; an answer sent later is told that nobody is there. X5"""
    async with serving() as rig:
        rig.handler.is_holding = True
        client = await rig.connect()
        client.send(GET * 3)
        await until(lambda: len(rig.handler.exchanges) == 3)
        rig.handler.answer(rig.handler.exchanges[1])
        if is_half:
            client.writer.write_eof()
        else:
            client.writer.transport.abort()
        await until(lambda: rig.front.connections == 0)

        assert rig.handler.abandoned == [rig.handler.exchanges[0], rig.handler.exchanges[2]]
        assert rig.handler.answer(rig.handler.exchanges[0]) is False


async def test_a_closed_connection_leaves_nothing_to_the_garbage_collector():
    """Connection, reader and parser let go of one another, however the connection ends. F6"""
    async with serving() as rig:
        gc.collect()
        gc.disable()
        try:
            for data in (GET, post(b"abc")[:-1], b"nonsense\r\n\r\n", GET.replace(b"1.1", b"1.0")):
                client = await rig.connect()
                client.send(data)
                await asyncio.sleep(0.01)
                await client.close()
            await until(lambda: rig.front.connections == 0)
            rig.handler.exchanges.clear()
            await asyncio.sleep(0.01)

            assert not [thing for thing in gc.get_objects() if isinstance(thing, Connection)]
        finally:
            gc.enable()


async def test_one_failing_cancellation_does_not_keep_the_others_from_theirs():
    """Neighbours are cancelled whatever one callback does. F6"""
    async with serving() as rig:
        reports = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
        rig.handler.is_holding = True
        client = await rig.connect()
        client.send(GET * 2)
        await until(lambda: len(rig.handler.exchanges) == 2)
        rig.handler.exchanges[0].on_abandoned = lambda: 1 / 0
        await client.close()
        await until(lambda: rig.front.connections == 0)

        assert rig.handler.abandoned == [rig.handler.exchanges[1]]
        assert len(reports) == 1


async def test_an_answer_computed_before_the_caller_half_closes_still_arrives():
    """Closing sends what was written before. P1"""
    async with serving() as rig:
        rig.handler.reply = lambda exchange: (200, b"", [bytes(4 << 20)])
        client = await rig.connect()
        client.send(GET)
        await until(lambda: len(rig.handler.exchanges) == 1)
        client.writer.write_eof()

        assert len((await client.receive()).body) == 4 << 20


# ── Content coding ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("coding", "squeeze"),
    [(b"gzip", gzip.compress), (b"GZIP", gzip.compress), (b"deflate", zlib.compress), (b"identity", bytes)],
)
@pytest.mark.parametrize("length", [10, 1_000_000])
async def test_compressed_bodies_arrive_decompressed(coding, squeeze, length):
    """gzip and deflate (zlib) of any length, in order with the requests around them. P1"""
    body = bytes(range(256)) * (length // 256) + b"end"
    async with serving() as rig:
        client = await rig.connect()
        sent = squeeze(body)
        client.send(post(sent, b"content-encoding: " + coding) + GET)
        first, second = await client.receive(), await client.receive()

        assert (first.json["target"], second.json["target"]) == ("/infer", "/v2")
        exchange = next(exchange for exchange in rig.handler.exchanges if exchange.method == "POST")
        assert exchange.body == body
        assert exchange.body_bytes_received == len(sent)


@pytest.mark.parametrize(
    "body",
    [b"not gzip", gzip.compress(b"a" * 100)[:-1], gzip.compress(b"a") + b"tail", gzip.compress(b"a") * 2],
    ids=["garbage", "cut short", "trailing bytes", "two members"],
)
async def test_a_body_that_does_not_decompress_is_400_and_the_connection_goes_on(body):
    """Its framing is sound, so only the request is refused. S2"""
    async with serving() as rig:
        client = await rig.connect()

        assert_is_error(await client.ask(post(body, b"content-encoding: gzip")), 400, "bad_request")
        assert (await client.ask(GET)).status == 200
        assert len(rig.handler.refusals) == 1


@pytest.mark.parametrize("bytes_max", [4096, 1_000_000])
async def test_a_zip_bomb_is_413_and_memory_stays_flat(bytes_max):
    """Decompression stops one byte above the limit. S2"""
    squeezer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(squeezer.compress(bytes(1 << 20)) for _ in range(300)) + squeezer.flush()
    async with serving(body_bytes_max=bytes_max) as rig:
        client = await rig.connect()
        bomb = bomb[:bytes_max]
        tracemalloc.start()
        response = await client.ask(post(bomb, b"content-encoding: gzip"))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert_is_error(response, 413, "body_too_large")
        assert peak < 6 * bytes_max + 1_000_000
        assert rig.handler.exchanges == []


@pytest.mark.parametrize(
    ("accept", "body_bytes", "coding"),
    [
        (b"gzip", 2000, "gzip"),
        (b"deflate", 2000, "deflate"),
        (b"gzip, deflate, br", 2000, "gzip"),
        (b"gzip;q=0.1, deflate;q=0.5", 2000, "deflate"),
        (b"*", 2000, "gzip"),
        (b"gzip;q=0, *", 2000, "deflate"),
        (b"identity;q=0, gzip", 20, "gzip"),
        (b"gzip", 300_000, "gzip"),
        (b"gzip", 1023, None),
        (b"gzip;q=0", 2000, None),
        (b"identity, gzip;q=0.5", 2000, None),
        (b"br", 2000, None),
        (b"*;q=0", 2000, None),
        (b"gzip;q=high", 2000, None),
        (b"", 2000, None),
    ],
)
async def test_answers_are_compressed_as_asked(accept, body_bytes, coding):
    """Accept-Encoding with its weights decides; small bodies stay as they are unless identity is refused. P1"""
    async with serving() as rig:
        body = b"0.5," * (body_bytes // 4) + b"x" * (body_bytes % 4)
        rig.handler.reply = lambda exchange: (200, JSON, [body[:7], memoryview(body)[7:]])
        client = await rig.connect()
        response = await client.ask(post(b"", b"accept-encoding: " + accept))

        assert response.headers.get("content-encoding") == coding
        plain = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}[coding](response.body)
        assert plain == body


async def test_only_predictions_are_compressed():
    """tritonclient's aio variant cannot read compressed metadata or errors, although it asks for them. P1"""
    async with serving() as rig:
        client = await rig.connect()
        rig.handler.reply = lambda exchange: (200, JSON, [b" " * 5000])
        metadata = await client.ask(GET.replace(b"host: h", b"host: h\r\naccept-encoding: gzip"))
        rig.handler.reply = lambda exchange: (400, JSON, [b" " * 5000])
        error = await client.ask(post(b"", b"accept-encoding: gzip"))

        assert "content-encoding" not in metadata.headers
        assert "content-encoding" not in error.headers


async def test_large_coding_does_not_stall_the_loop():
    """Bodies above 64 KB are coded on named threads while the loop serves others. X5"""
    body = b"".join(b"%d," % (i * i) for i in range(1_500_000))
    sent = zlib.compress(body, 1)
    async with serving() as rig:
        rig.handler.reply = lambda exchange: (200, JSON, [exchange.body or b"{}"])
        large, small = await rig.connect(), await rig.connect()
        large.send(post(sent, b"content-encoding: deflate", b"accept-encoding: gzip"))
        await until(lambda: any("headrace-http-compression" in thread.name for thread in threading.enumerate()))
        started_s = time.perf_counter()
        await small.ask(GET)
        small_s = time.perf_counter() - started_s
        response = await large.receive()
        large_s = time.perf_counter() - started_s

        assert gzip.decompress(response.body) == body
        assert small_s < large_s / 2


async def test_a_caller_who_leaves_during_decompression_is_not_handed_over():
    """A request whose caller has gone before it was complete is nobody's. X5"""
    async with serving() as rig:
        client = await rig.connect()
        client.send(post(zlib.compress(bytes(30 << 20), 1), b"content-encoding: deflate"))
        await until(lambda: any("headrace-http-compression" in thread.name for thread in threading.enumerate()))
        client.writer.transport.abort()
        await until(lambda: rig.front.connections == 0)
        rig.front.close()
        await asyncio.sleep(0.01)

        assert rig.handler.exchanges == []
        assert rig.handler.refusals == []


def test_weights_follow_the_standard():
    """RFC 9110 §12.5.3, cases that no client above sends. P1"""
    assert chosen_coding(b"X-GZIP") == (b"gzip", False)
    assert chosen_coding(b"gzip;q=0.001, *;q=0") == (b"gzip", True)
    assert chosen_coding(b"identity;q=0") == (b"", False)
    assert chosen_coding(b"gzip;q=2, deflate;q=-1") == (b"", False)


# ── Error replies ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("retry_after_s", "line"),
    [
        (None, b""),
        (0.001, b"retry-after: 1\r\n"),
        (1.2, b"retry-after: 2\r\n"),
        (float("inf"), b"retry-after: 86400\r\n"),
        (float("nan"), b"retry-after: 86400\r\n"),
    ],
)
def test_an_error_reply_says_when_to_come_back(retry_after_s, line):
    """Whole seconds, at least one; the content type has no charset. S2"""
    status, head, body = error_reply(QueueFull("full", retry_after_s=retry_after_s))

    assert (503, JSON + line, [b'{"error":"full","code":"queue_full"}']) == (status, head, body)


def test_an_error_reply_survives_any_text():
    """A lone surrogate in a message does not break the reply; 415 lists what is offered. S2"""
    assert error_reply(BadRequest("\ud800"))[2] == [b'{"error":"\\\\ud800","code":"bad_request"}']
    assert b"accept-encoding: gzip, deflate\r\n" in error_reply(UnsupportedEncoding("x"))[1]


# ── Fuzzing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "executions", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_no_stream_of_bytes_breaks_a_promise(executions):
    """Mutated streams: every promise in `headrace.testing.fuzz`, whole and cut into pieces. S2"""
    report = run(executions, seed=executions)

    assert report.failures == []
    assert report.requests > executions // 10
    assert report.refusals > executions // 10
