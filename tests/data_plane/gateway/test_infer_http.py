"""The headers of an inference call: trace ids."""

import pytest

from headrace.data_plane.gateway.http import Exchange
from headrace.data_plane.gateway.infer_http import Ids, read_ids

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"


def trace_id(traceparent: bytes) -> bytes:
    exchange = Exchange(None, "POST", b"/", {b"traceparent": traceparent}, b"", 0.0, 0)
    return read_ids(exchange, Ids())[1].encode()


@pytest.mark.parametrize(
    "traceparent",
    [
        b"00-%b-%b-01" % (TRACE, SPAN),
        b"00-%b-%b-00" % (TRACE, SPAN),
        b"cc-%b-%b-01" % (TRACE, SPAN),
        b"cc-%b-%b-01-what-the-future-will-be-like" % (TRACE, SPAN),
    ],
)
def test_the_trace_of_the_caller_goes_on(traceparent: bytes) -> None:
    """O1: W3C Trace Context 3.2.2; a later version may have more to say behind the flags."""
    assert TRACE == trace_id(traceparent)


@pytest.mark.parametrize(
    "traceparent",
    [
        b"",
        b"00-%b-%b" % (TRACE, SPAN),
        b"00-%b-%b-01-more" % (TRACE, SPAN),
        b"00-%b-%b-01, 00-%b-%b-01" % (TRACE, SPAN, TRACE, SPAN),
        b"00-%b-%b-zz" % (TRACE, SPAN),
        b"zz-%b-%b-01" % (TRACE, SPAN),
        b"ff-%b-%b-01" % (TRACE, SPAN),
        b"00-%b-%b-01" % (TRACE.upper(), SPAN),
        b"00-%b-%b-01" % (b"0" * 32, SPAN),
        b"00-%b-%b-01" % (TRACE, b"0" * 16),
        b"00-%b%b-%b-01" % (TRACE[:16], b"0" * 16, SPAN),
        b"00-%b-%b-01\r\nx-injected: 1" % (TRACE, SPAN),
    ],
)
def test_a_trace_header_that_is_not_one_starts_a_new_trace(traceparent: bytes) -> None:
    """O1: W3C Trace Context 3.3: what cannot be parsed, or comes twice, is ignored."""
    assert TRACE != trace_id(traceparent)
    assert 32 == len(trace_id(traceparent))
