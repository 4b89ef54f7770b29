"""A web server and pages for the readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants


class Server(ThreadingHTTPServer):
    """Answers from `content`; notes every request. `cut`: bytes after which each answer breaks off, once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content: dict[str, tuple[int, str, bytes]] = {}
        self.seen: list[tuple[str, float]] = []
        self.failures: dict[str, int] = {}  # further answers that are errors
        self.cut: int | None = None
        self.etag = '"one"'
        self.at_once = self.most_at_once = 0
        self.hold = 0.0  # seconds that each request waits for its answer
        self.lock = threading.Lock()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_address[1]}{path}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen if path != "/robots.txt"]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, head: bool) -> None:
        server = self.server
        with server.lock:
            if not head:
                server.seen.append((self.path, time.monotonic()))
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            failing = 0 if head else server.failures.get(self.path, 0)
            server.failures[self.path] = max(0, server.failures.get(self.path, 0) - bool(failing))
        time.sleep(server.hold)
        with server.lock:  # before the answer: its reader may send the next request before this thread goes on
            server.at_once -= 1
        status, kind, body = (
            (503, "text/plain", b"") if failing else server.content.get(self.path, (404, "text/plain", b""))
        )
        start = 0
        if status == 200 and (asked := self.headers.get("Range")) and self.headers.get("If-Range") == server.etag:
            status, start = 206, int(asked.removeprefix("bytes=").removesuffix("-"))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("ETag", server.etag)
        self.end_headers()
        if head:
            return
        cut, server.cut = server.cut, None
        self.wfile.write(body[start : cut and start + cut])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on this machine, which downloads may reach."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


PAGE = """  <page>
    <title>{title}</title>
    <ns>{ns}</ns>
    <revision><text xml:space="preserve">{text}</text></revision>
  </page>
"""
