"""The HTTP application: routes, authorization, limits, and streams that end when the client disconnects."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from crosstrain import log
from crosstrain.distributed.launch.rendezvous import is_loopback

from .api_error import ApiError
from .jobs import Event, Job, Piece
from .requests import ChatRequest, CompletionRequest, parse
from .responses import ChatResponse, CompletionResponse, ResponseBuilder
from .scheduler import Scheduler
from .service import Service

Events = asyncio.Queue[Event | ClientDisconnect]

_BODIES = 8  # limit on the request bytes held at once, as a multiple of the size limit of one body
_PAGE = Path(__file__).with_name("page.html")
_PAGE_HEADERS = {
    # The page loads no other resource, and shows only text and the images that its user chose.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Web:
    """The HTTP application in front of a scheduler."""

    def __init__(self, service: Service, scheduler: Scheduler, tokenizer: Any, key: str | None, host: str) -> None:
        """`host`: the address to listen on. With a loopback address, requests for non-loopback hosts are refused."""
        self._service, self._scheduler, self._tokenizer = service, scheduler, tokenizer
        self._key = None if key is None else key.encode()
        self._loopback = is_loopback(host)
        self._since = int(time.time())
        # Chats have their own threads, so that slow chats do not delay completions. At most 2 threads read images,
        # because images need memory.
        most = service.limits.encoders
        threads = {CompletionRequest: most, ChatRequest: 2 if service.chat_format.takes_images else most}
        self._encoding: dict[Any, Any] = {kind: ThreadPoolExecutor(n, "encoding") for kind, n in threads.items()}
        self._requests, self._bytes = 0, 0  # number of requests being answered, and bytes of the bodies being held
        completions = partial(self._answer, CompletionRequest, service.completion, CompletionResponse)
        chats = partial(self._answer, ChatRequest, service.chat, ChatResponse)
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", chats, methods=["POST"]),
            ],
            exception_handlers={
                HTTPException: _refused,
                ClientDisconnect: lambda *_: Response(status_code=499),  # nobody receives this response
                Exception: _broken,
            },
        )

    # ---- routes

    async def _page(self, request: Request) -> Response:
        self._check_host(request)
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    async def _health(self, request: Request) -> Response:
        running, waiting = self._scheduler.busy
        stuck = self._service.encoders.stuck
        state = {"status": "busy" if stuck else "ok", "running": running, "waiting": waiting}
        return JSONResponse(state | ({"stuck": stuck} if stuck else {}))

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def _model(self, request: Request) -> Response:
        self._admit(request)
        if request.path_params["name"] != self._service.name:
            raise ApiError(
                404,
                f"this model does not exist; the server has only {self._service.name!r}",
                "model",
                "model_not_found",
            )
        return JSONResponse(self._description())

    def _description(self) -> dict[str, Any]:
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._since,
            "owned_by": "crosstrain",
            "max_model_len": self._service.model.max_length,
            "images": self._service.chat_format.takes_images,
        }

    # ---- authorization

    def _check_host(self, request: Request) -> None:
        """If the server listens on a loopback address, reject requests for other hosts to prevent DNS rebinding.

        In the Host header, a browser sends the host name of the site that served the page.
        """
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        except ValueError:
            host = ""
        if self._loopback and not is_loopback(host):
            raise ApiError(403, "this server answers only requests to localhost", code="wrong_host")

    def _admit(self, request: Request) -> None:
        self._check_host(request)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if self._key is not None and not (
            scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)
        ):
            raise ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")

    # ---- completions

    async def _answer(
        self, kind: Any, plan: Callable[..., list[Job]], builder: Callable[..., ResponseBuilder], request: Request
    ) -> Response:
        self._admit(request)
        jobs, limits = list[Job](), self._service.limits
        loop, events = asyncio.get_running_loop(), Events()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the event loop may end before the computation
                loop.call_soon_threadsafe(events.put_nowait, event)

        with ExitStack() as end:
            async with self._body(request) as body:
                if self._requests >= limits.waiting + limits.batch:
                    raise ApiError(429, "too many requests at once; try again later", code="too_many_requests")
                self._requests += 1
                end.callback(self._end, jobs)
                asked = parse(body, kind)
                jobs += await loop.run_in_executor(self._encoding[kind], plan, asked, deliver)
            self._scheduler.submit(jobs)
            response = builder(self._service.name, jobs, self._tokenizer)
            leaving = asyncio.create_task(_leaving(request, events))
            end.callback(leaving.cancel)
            if not asked.stream:
                while response.unfinished:
                    response.add(await _next(events))
                return JSONResponse(response.whole())
            with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
            stream = _stream(response, await _next(events), events, with_usage)
            leaving.cancel()  # the stream detects a disconnect itself
            return _Stream(stream, limits.seconds + 60, end.pop_all().close)

    def close(self) -> None:
        """Stop encoding."""
        for executor in self._encoding.values():
            executor.shutdown(wait=False, cancel_futures=True)
        self._service.encoders.close()

    def _end(self, jobs: list[Job]) -> None:
        self._requests -= 1
        self._scheduler.cancel(jobs)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Yield the body; its bytes count as held until the block ends. Raises ApiError 415, 413, 408 or 503."""
        limits = self._service.limits
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send JSON, with Content-Type: application/json", code="unsupported_media_type")
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(limits.body_seconds):
                    async for part in request.stream():
                        body += part
                        self._bytes += len(part)
                        if len(body) > limits.body_bytes:
                            raise ApiError(
                                413, f"the body has more than {limits.body_bytes} bytes", code="body_too_large"
                            )
                        if self._bytes > _BODIES * limits.body_bytes:
                            raise ApiError(503, "too much data is being sent at once; try again later", code="busy")
            except TimeoutError:
                raise ApiError(
                    408, f"the body did not arrive within {limits.body_seconds:g} s", code="timeout"
                ) from None
            yield body
        finally:
            self._bytes -= len(body)


class _Stream(StreamingResponse):
    """A stream of events that ends if the client reads too slowly; `at_end` is called in any case."""

    def __init__(self, content: AsyncIterator[str], seconds: float, at_end: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._seconds, self._at_end = seconds, at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("a client read its stream too slowly and was disconnected")
        finally:
            self._at_end()


async def _leaving(request: Request, events: Events) -> None:
    """Put an event into the queue when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    events.put_nowait(ClientDisconnect())


async def _next(events: Events) -> Piece:
    event = await events.get()
    if isinstance(event, Exception):
        raise event
    return event


async def _stream(response: ResponseBuilder, piece: Piece, events: Events, with_usage: bool) -> AsyncIterator[str]:
    usage = {"usage": None} if with_usage else {}
    for opening in response.openings():
        yield _event(response.chunk([opening], **usage))
    try:
        while True:
            response.add(piece)
            yield _event(response.chunk([response.part(piece)], **usage))
            if not response.unfinished:
                break
            piece = await _next(events)
    except ApiError as error:  # the HTTP status was already sent
        yield _event(error.document)
        return
    except ClientDisconnect:
        return
    if with_usage:
        yield _event(response.chunk([], usage=response.usage()))
    yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # For an unknown route, the web framework raises an HTTPException that is not an ApiError.
    known = error if isinstance(error, ApiError) else ApiError(error.status_code, error.detail)
    return JSONResponse(known.document, error.status_code, headers=error.headers)


def _broken(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return _refused(request, ApiError(500, "the server failed", code="failed"))
