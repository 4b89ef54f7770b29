"""A real S3 server on loopback (moto's), which counts requests and can be told to fail them or to slow them down.

The variable S3_SERVER, such as http://key:secret@127.0.0.1:8333, names another server to run the same tests against;
how to start one stands in docs/buckets.md.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import pytest

Answer = Callable[[Any], Any]  # a request's environment -> None: go on; or (status, code) to refuse it with


@dataclass
class Bucket:
    """A server with one bucket. `interfere` is called with the environment of each request before it is served."""

    address: str
    key: str = "id"
    secret: str = "secret"
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, path with query
    sent: Counter[str] = field(default_factory=Counter)  # bytes of the bodies of answers, by AWS_SDK_UA_APP_ID
    interfere: Answer = lambda environ: None

    @property
    def url(self) -> str:
        return "s3://bucket"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which S3's libraries find the server."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def count(self, method: str) -> int:
        return sum(found == method for found, _ in self.requests)

    @contextmanager
    def interfered(self, interfere: Answer) -> Iterator[None]:
        self.interfere = interfere
        try:
            yield
        finally:
            self.interfere = lambda environ: None


_REFUSAL = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>The {0} message.</Message></Error>"


def refuse(first: int, status: str, code: str, method: str = "") -> Answer:
    """Refuse the first so many requests (of a method)."""
    left = [first]

    def answer(environ: Any) -> Any:
        if environ["REQUEST_METHOD"].startswith(method) and left[0] > 0:
            left[0] -= 1
            return status, code
        return None

    return answer


def reset(environ: Any) -> None:
    """Break a request's connection off, without an answer."""
    environ["werkzeug.socket"].shutdown(2)


def kill_at(number: int, pid: Path, served: bool) -> Answer:
    """Kill the process whose id stands in a file at the so-and-so-many-th put, which is served or not."""
    left = [number]

    def answer(environ: Any) -> Any:
        left[0] -= environ["REQUEST_METHOD"] in ("PUT", "POST")
        if left[0] != 0:
            return None
        left[0] = -1
        # It has arrived. Reading on would be waiting for the next request, which comes after the answer to this one.
        size = environ.get("CONTENT_LENGTH")
        environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(size) if size else -1))
        os.kill(int(pid.read_text()), signal.SIGKILL)
        return None if served else ("503 Slow Down", "SlowDown")

    return answer


def slow(seconds: float, method: str = "") -> Answer:
    return lambda environ: time.sleep(seconds) if environ["REQUEST_METHOD"].startswith(method) else None


def _forward(server: SplitResult) -> Callable[[dict[str, Any], Any], list[bytes]]:
    """Return an application that passes each request on to a server, and its answer back."""

    def app(environ: dict[str, Any], start: Any) -> list[bytes]:
        headers = {n[5:].replace("_", "-"): value for n, value in environ.items() if n.startswith("HTTP_")}
        headers |= {n.replace("_", "-"): environ[n] for n in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(n)}
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with closing(HTTPConnection(server.hostname or "", server.port, timeout=60)) as connection:
            connection.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body, headers)
            answer = connection.getresponse()
            passed = [(n, v) for n, v in answer.getheaders() if n.lower() not in ("transfer-encoding", "connection")]
            start(f"{answer.status} {answer.reason}", passed)
            return [answer.read()]

    return app


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Bucket]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    other = urlsplit(os.environ.get("S3_SERVER", ""))
    s3 = _forward(other) if other.hostname else DomainDispatcherApplication(create_backend_app)
    found: list[Bucket] = []

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        bucket = found[0]
        path = environ["PATH_INFO"] + (f"?{q}" if (q := environ["QUERY_STRING"]) else "")
        bucket.requests.append((environ["REQUEST_METHOD"], path))
        if (refused := bucket.interfere(environ)) is not None:
            status, code = refused
            start(status, [("Content-Type", "application/xml")])
            return [_REFUSAL.format(code).encode()]
        body = b"".join(s3(environ, start))
        app = re.search(r"app/(\S+)", environ.get("HTTP_USER_AGENT", ""))
        bucket.sent[app[1] if app else ""] += len(body)
        return [body]

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    address = f"http://127.0.0.1:{server.server_port}"
    found.append(Bucket(address, other.username or "id", other.password or "secret"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found[0]
    server.shutdown()


@pytest.fixture
def bucket(s3_server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The server with an empty bucket, and this process's environment set for it."""
    import boto3

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    # A server of its own on loopback is no use of anybody's network.
    monkeypatch.setenv("NO_PROXY", os.environ.get("NO_PROXY", "") + ",127.0.0.1")
    s3 = boto3.resource("s3").Bucket("bucket")
    s3.create()
    s3_server.requests.clear()
    s3_server.sent.clear()
    yield s3_server
    s3.objects.delete()
    s3.delete()
