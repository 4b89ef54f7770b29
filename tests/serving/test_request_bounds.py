"""A request ends where every program says so: forms that a proxy in front may read otherwise are refused."""

from __future__ import annotations

import h11
import pytest
from crosstrain_plugins.builtin.commands.serve.connections import StrictHttp

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
TAKEN = {
    "a length": HEAD + b"Content-Length: 2\r\n\r\n{}",
    "no body": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "chunks": CHUNKS + b"2\r\n{}\r\n0\r\n\r\n",
    "chunks that hold lines": CHUNKS + b"4\r\n{\n\n}\r\n5\r\n\n\n\r\n\n\r\n000\r\nX-Sum: y\r\n\r\n",
    "two requests": (HEAD + b"Content-Length: 2\r\n\r\n{}") * 2,
}
REFUSED = {
    "a length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": HEAD + b"transfer-encoding: chunked\r\nA: b\r\ncontent-length: 2\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
    "a length twice": HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
    "a length with a sign": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a length in hexadecimal": HEAD + b"Content-Length: 0x2\r\n\r\n{}",
    "two encodings": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a list of encodings": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "an unknown encoding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a control character": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a folded header": HEAD + b"A: b\r\n c\r\nContent-Length: 2\r\n\r\n{}",
    "a folded encoding": HEAD + b"Transfer-Encoding:\r\n\tchunked\r\n\r\n0\r\n\r\n",
    "lines that end in LF": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}",
    "a header that ends in LF": HEAD + b"A: b\nContent-Length: 2\r\n\r\n{}",
    "an empty line of LF": HEAD + b"Content-Length: 2\r\n\n{}",
    "a CR within a header": HEAD + b"A: b\rContent-Length: 3\r\nContent-Length: 2\r\n\r\n{}",
    "chunks of HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two hosts": HEAD + b"Host: elsewhere\r\n\r\n",
    "an extension of a chunk": CHUNKS + b"2;a=b\r\n{}\r\n0\r\n\r\n",
    "an extension of a later chunk": CHUNKS + b'2\r\n{}\r\n2;a="\n"\r\n{}\r\n0\r\n\r\n',
    "an extension of the last chunk": CHUNKS + b"2\r\n{}\r\n0;x\r\n\r\n",
    "a chunk's size that ends in LF": CHUNKS + b"2\n{}\r\n0\r\n\r\n",
    "a chunk's size with a prefix": CHUNKS + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk that is longer": CHUNKS + b"2\r\n{}XX0\r\n\r\n",
    "a trailer that ends in LF": CHUNKS + b"2\r\n{}\r\n0\r\nA: b\n\n",
    "a body that ends in LF": CHUNKS + b"2\r\n{}\r\n0\r\n\n",
    "lengths in a trailer": CHUNKS + b"2\r\n{}\r\n0\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\n",
}  # fmt: skip


def ends(sent: bytes, at_once: int) -> int:
    """Number of whole requests that arrive, `at_once` bytes at a time. Raises RemoteProtocolError."""
    connection, found = StrictHttp(h11.SERVER), 0
    for start in range(0, len(sent), at_once):
        connection.receive_data(sent[start : start + at_once])
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            found += isinstance(event, h11.EndOfMessage)
        if connection.their_state is h11.DONE:
            for answer in (h11.Response(status_code=200, headers=[("Content-Length", "0")]), h11.EndOfMessage()):
                connection.send(answer)
            connection.start_next_cycle()
    return found + (connection.next_event() is not h11.NEED_DATA if connection.their_state is h11.IDLE else 0)


@pytest.mark.parametrize("at_once", [1, 7, 10_000])
@pytest.mark.parametrize("kind", TAKEN)
def test_usual_requests_are_taken(kind: str, at_once: int) -> None:
    assert ends(TAKEN[kind], at_once) == 1 + (kind == "two requests")


@pytest.mark.parametrize("at_once", [1, 7, 10_000])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_request_whose_end_is_ambiguous_is_refused(kind: str, at_once: int) -> None:
    with pytest.raises(h11.RemoteProtocolError):
        ends(REFUSED[kind], at_once)
