"""A server in this process, on a port of its own, with a real checkpoint behind it."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain_plugins.builtin.commands.serve.limits import Limits
from crosstrain_plugins.builtin.commands.serve.server import listen, run_server
from openai import OpenAI

from conftest import kill, wait_until
from crosstrain.config.load import Config
from crosstrain.engine.build import build_model
from crosstrain.engine.runner import Runner
from crosstrain.inference.open_checkpoint import saved_config
from fixtures_processes import Program

LISTENS = re.compile(r"^serving .* on (http://\S+);", re.MULTILINE)


class Stop:
    """Set from the test where a signal would come."""

    wanted = False

    def __bool__(self) -> bool:
        return self.wanted


@dataclass
class Server:
    """Where it listens, and the runner behind it."""

    port: int
    runner: Runner
    checkpoint: Path
    key: str | None = None

    def client(self, **more: Any) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=self.key or "any", max_retries=0, **more)

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, seconds: float = 60
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, document and headers of an answer; `body` as it stands if it is bytes, else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {"Content-Type": "application/json"} | (headers or {})
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.getheader("content-type", "")
            document = json.loads(text) if kind.startswith("application/json") else text.decode()
            return answer.status, document, {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()

    def health(self) -> dict[str, Any]:
        return self.send("GET", "/health")[1]


def wait_for(server: Server, seconds: float = 10, **state: int) -> None:
    """Ask for the server's health until it has these numbers: a slot is freed after its end is told."""
    deadline = time.monotonic() + seconds
    while not state.items() <= server.health().items():
        assert time.monotonic() < deadline, server.health()
        time.sleep(0.01)


def loaded(checkpoint: Path, *options: str) -> tuple[Config, Runner]:
    """A single-process runner with a checkpoint's model."""
    config = saved_config(checkpoint, list(options))
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, checkpoint, for_training=False)
    return config, runner


@contextmanager
def served(
    checkpoint: Path, *options: str, limits: Limits | None = None, key: str | None = None, name: str = "tiny"
) -> Iterator[Server]:
    """A server of a checkpoint under one process; what it computes in is another thread."""
    limits = limits or Limits(batch=4)
    config, runner = loaded(checkpoint, *options)
    job = {"checkpoint": checkpoint, "name": name, "host": "127.0.0.1", "api_key": key}
    listener, stop = listen("127.0.0.1", 0), Stop()
    port = listener.getsockname()[1]

    def compute() -> None:
        with runner.evaluating():
            run_server(config, runner, job, limits, listener, stop)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield Server(port, runner, checkpoint, key)
    finally:
        stop.wanted = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def serving(checkpoint: Path, *arguments: str) -> Iterator[tuple[str, Program]]:
    """The program itself; its URL."""
    command = ["serve", "--checkpoint", str(checkpoint), "--port", "0", *arguments]
    process = Program(Path(), command, merged=True)
    try:
        wait_until(lambda: LISTENS.search(process.said) is not None, process)
        yield LISTENS.findall(process.said)[0], process
    finally:
        kill(process)
