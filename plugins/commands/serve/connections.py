"""uvicorn connections (tested with 0.54) with time limits, and with errors in OpenAI's format."""

import asyncio
import json
import re
import sys
from typing import Any, Literal, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .api_error import ApiError
from .limits import Limits

_FAIR = 1.0  # seconds that each request may take to arrive, even if too many requests are arriving
_Phase = Literal["idle", "headers", "body"]


# Problem -> pattern of requests for which a proxy and this server may disagree about the end of the request.
_AMBIGUOUS = {
    "a line does not end in CR LF": re.compile(rb"(?<!\r)\n|\r(?!\n)"),
    "a header continues on the next line": re.compile(rb"\n[ \t]"),
    "its length is given twice": re.compile(rb"(?is)\n(?:content-length|transfer-encoding):.*"
                                            rb"\n(?:content-length|transfer-encoding):"),
    "its length is not a number": re.compile(rb"(?i)\ncontent-length:(?![ \t]*\d+[ \t]*\r\n)"),
    "HTTP/1.0 does not support chunks": re.compile(rb"(?is)HTTP/1\.0\r\n(?:.*\n)?transfer-encoding:"),
}  # fmt: skip
_END_OF_HEADERS = re.compile(rb"\r?\n\r?\n")
_CHUNK = re.compile(rb"[0-9A-Fa-f]{1,16}")


class StrictHttp(h11.Connection):
    """An h11 connection (tested with 0.16) that refuses requests that a proxy may interpret differently."""

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError if the request is not HTTP, or is ambiguous."""
        given, reader = self.trailing_data[0], cast(Any, self._reader)
        headers = self.their_state is h11.IDLE or getattr(reader, "_reading_trailer", False)
        if not headers and getattr(reader, "_bytes_in_chunk", 1) == 0:
            size, end, given = given.removeprefix(reader._bytes_to_discard).partition(b"\r\n")
            if end and not _CHUNK.fullmatch(size):
                raise h11.RemoteProtocolError("a chunk header contains more than the size")
            headers = not size.strip(b"0")
        lines = b"\r\n" + given
        if headers and (found := _END_OF_HEADERS.search(lines)):
            for problem, form in _AMBIGUOUS.items():
                if form.search(lines, endpos=found.end()):
                    raise h11.RemoteProtocolError(problem)
        return super().next_event()


class Connection(H11Protocol):
    """A connection that is closed if its request does not arrive in time.

    If too many connections have incomplete requests, the oldest such connection is closed, so that clients that send
    nothing cannot keep others out.
    """

    def __init__(self, limits: Limits, arriving: "dict[Connection, float]", **given: Any) -> None:
        """`arriving`: connection of this server with an incomplete request -> start time of its phase; oldest first."""
        super().__init__(**given)
        self.conn = StrictHttp(h11.SERVER)
        self._limits, self._arriving = limits, arriving
        self._phase: _Phase | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.all_connections:
            self._refuse(ApiError(503, "too many connections; try again later", code="busy"))
        else:
            self._watch("headers")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch("headers")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch("idle")

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        error = sys.exc_info()[1]  # the error that uvicorn handles here
        status = getattr(error, "error_status_hint", 400)
        self._refuse(ApiError(status, f"invalid HTTP request: {error or msg}", code="invalid_http"))

    def _watch(self, before_headers: _Phase) -> None:
        phases: dict[Any, _Phase] = {h11.IDLE: before_headers, h11.SEND_BODY: "body"}
        phase = None if self.transport.is_closing() else phases.get(self.conn.their_state)
        if phase != self._phase:
            self._enter(phase)
        oldest = next(iter(self._arriving), self)
        if len(self._arriving) > self._limits.connections and self.loop.time() - self._arriving[oldest] > _FAIR:
            oldest._late()

    def _enter(self, phase: _Phase | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._arriving.pop(self, None)
        self._phase, self._timer = phase, None
        if phase is not None:
            self._arriving[self] = self.loop.time()
            # The application limits the time for a body, unless it answers without reading the body. uvicorn limits the
            # idle time.
            seconds = {"headers": self._limits.header_seconds, "body": self._limits.body_seconds + 5}.get(phase)
            self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self._phase == "idle":
            self.transport.close()
        else:
            self._refuse(ApiError(408, "the request did not arrive in time", code="timeout"))
        self._enter(None)

    def _refuse(self, refusal: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(refusal.document).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
            answer = h11.Response(
                status_code=refusal.status_code,
                reason=STATUS_PHRASES[refusal.status_code],
                headers=list((headers | dict(refusal.headers or {})).items()),
            )
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
