"""Hostile templates and tokenizers, and clients that stall, cost their own request only; the server always ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.serve.limits import Limits

from crosstrain.cli.main import main
from crosstrain.data import tokenizer as data_tokenizer
from crosstrain.inference import encoding
from crosstrain.inference.encoding import Encoders, check_decoder
from crosstrain.utils.errors import CheckpointError
from crosstrain.utils.limited_process import LimitError, NoProcess
from fixtures_server import Server, served, serving, wait_for
from fixtures_tampering import HARMFUL, never_ends, seal

# Each does harm where a user says so, and answers everybody else.
HARM = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "a huge text": "{{ 'x' * 10 ** 10 }}",
    "a huge number": "{{ 10 ** 10 ** 9 }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "quadratic": "{% set n = namespace(x='') %}{% for i in range(99999) %}{% set n.x = 'xxxx' ~ n.x %}{% endfor %}"
                 "{{ n.x | replace('x', n.x) | length }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "many in many": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
                    "{{ n.x }}",
    "a wide field": "{{ '%999999999999d' % 1 }}",
    "padding": "{{ ''.center(99999999999) }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the world of a function": "{{ cycler.__init__.__globals__.os.system('touch harmed') }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
    "an error": "{{ 1 / 0 }}",
    "a name": "{{ nothing.at.all }}",
    "a file": "{% include '/etc/passwd' %}",
}  # fmt: skip


def template() -> str:
    """A chat template that does one kind of harm where a user names it, and answers everybody else."""
    said = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<says>"
    branches = (f"{{% if messages[0].content == 'harm by {kind}' %}}" for kind in HARM)
    return "".join(f"{branch}{harm}{{% else %}}" for branch, harm in zip(branches, HARM.values(), strict=True)) + (
        said + "{% endif %}" * len(HARM)
    )


def chat(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": words}]


def hostile(speaker: Path, folder: Path) -> Path:
    copy = Path(shutil.copytree(speaker, folder / "step_000030"))
    (copy / "chat_template.jinja").write_text(template())
    return copy


@pytest.fixture(scope="module")
def encoders(speaker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoders]:
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr(encoding, "_SECONDS", 1.0)
        encoders = Encoders(hostile(speaker, folder))
        yield encoders
        encoders.close()
    assert not (folder / "harmed").exists()


@pytest.mark.parametrize("kind", HARM)
def test_a_hostile_template_costs_its_own_request(kind: str, encoders: Encoders) -> None:
    expected = encoders.encode("chat", chat("ban"))
    with ThreadPoolExecutor() as pool:
        started = time.monotonic()
        harmed = pool.submit(encoders.encode, "chat", chat(f"harm by {kind}"))
        assert encoders.encode("chat", chat("ban")) == expected
        with suppress(LimitError):  # what the sandbox renders harmlessly is fine
            assert len(harmed.result()) < 10_000
        assert time.monotonic() - started < 3.0
    refusal = harmed.exception()
    assert refusal is None or (isinstance(refusal, LimitError) and not isinstance(refusal, NoProcess)), refusal
    assert encoders.encode("chat", chat("ban")) == expected


def test_a_tokenizer_whose_expression_never_ends_costs_its_own_request(
    speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_SECONDS", 1.0)
    copy = Path(shutil.copytree(speaker, tmp_path / "step_000030"))
    never_ends(copy, "(a|aa)+$")
    encoders = Encoders(copy)
    try:
        assert encoders.encode("text", "ban")  # loads the tokenizer
        started = time.monotonic()
        with pytest.raises(LimitError, match=r"did not finish within 1 s|crashed|retry-limit"):
            encoders.encode("text", "a" * 5000 + "b")
        assert time.monotonic() - started < 3.0
        assert encoders.encode("text", "ban")
    finally:
        encoders.close()


def test_a_tokenizer_whose_expression_never_ends_does_not_hang_evaluation(
    speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(encoding, "_SECONDS", 1.0)
    copy = Path(shutil.copytree(speaker, tmp_path / "step_000030"))
    never_ends(copy)
    seal(copy)
    evaluate = ["evaluate", "--checkpoint", str(copy), "--max-new-tokens", "2"]
    assert main([*evaluate, "--generate", "ban", HARMFUL]) == 1
    assert "error: the tokenizer did not finish within 1 s" in capsys.readouterr().err
    typed = iter([HARMFUL, "ban", "stop"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert main([*evaluate, "--interactive", "--output", str(tmp_path / "said.json")]) == 0
    assert "error: the tokenizer did not finish within 1 s" in capsys.readouterr().out
    assert [said["prompt"] for said in json.loads((tmp_path / "said.json").read_text())["completions"]] == ["ban"]


def test_a_tokenizer_that_cannot_be_loaded_in_time_is_refused(
    speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(speaker, tmp_path / "step_000030"))
    document = json.loads((copy / "tokenizer.json").read_text())
    # Added tokens are normalized while they are loaded.
    document["normalizer"] = {"type": "Replace", "pattern": {"Regex": "a*a*$"}, "content": "x"}
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    document["added_tokens"].append(token | {"id": 10_000, "content": HARMFUL})
    (copy / "tokenizer.json").write_text(json.dumps(document))
    monkeypatch.setattr(data_tokenizer, "_TRYING", 1.0)  # of computing
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="its tokenizer cannot be loaded"):
        Encoders(copy)
    assert time.monotonic() - started < 20.0  # on a machine that others use, too


def test_a_decoder_that_lets_text_grow_is_refused(speaker: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(speaker)
    check_decoder(tokenizer, speaker)
    from tokenizers import Regex, decoders

    for decoder in (decoders.Replace("a", "aa"), decoders.Replace(Regex("(a|aa)+$"), "")):
        tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoder])
        with pytest.raises(CheckpointError, match="decoder replaces"):
            check_decoder(tokenizer, speaker)


def test_others_are_served_while_templates_hang(speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_SECONDS", 2.5)
    with served(hostile(speaker, tmp_path)) as server, ThreadPoolExecutor() as pool:
        body = {"model": "tiny", "max_tokens": 2}
        good = body | {"messages": chat("ban")}
        assert server.send("POST", "/v1/chat/completions", good)[0] == 200
        harmed = [
            pool.submit(server.send, "POST", "/v1/chat/completions", body | {"messages": chat("harm by endless")})
            for _ in range(4)
        ]
        seen = []
        while not all(future.done() for future in harmed):
            for path, asked in (("/v1/chat/completions", good), ("/v1/completions", body | {"prompt": "ban"})):
                started = time.monotonic()
                assert server.send("POST", path, asked)[0] == 200
                assert time.monotonic() - started < 2.0  # less than the limit of a template that hangs
            seen.append(server.health())
        for future in harmed:
            status, document, _ = future.result()
            assert (status, document["error"]["code"]) == (400, "encoding_timeout")
        assert {"status": "busy", "running": 0, "waiting": 0, "stuck": 4} in seen
        wait_for(server, running=0)
        assert server.health() == {"status": "ok", "running": 0, "waiting": 0}


@contextmanager
def sockets(port: int, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Connections that have sent so much and nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count + 500)), hard))
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(count)]
        for one in opened:
            with suppress(OSError):  # was closed for a later one
                one.sendall(sent)
        yield opened


def answer(one: socket.socket) -> tuple[int, dict[str, Any], http.client.HTTPResponse]:
    response = http.client.HTTPResponse(one)
    response.begin()
    document = json.loads(response.read())
    with suppress(ConnectionResetError):  # bytes that the server has not read turn its close into a reset
        assert one.recv(1) == b""  # and it is closed
    return response.status, document, response


UNREAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"  # refused at once
HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
STALLED = {
    "silent": b"", "half a line": b"GET /hea", "half the headers": HEADERS,
    "half a body": HEADERS + b"Content-Length: 9\r\n\r\n{",
    "half a body that nobody reads": UNREAD + b"Content-Length: 9\r\n\r\n{",
}  # fmt: skip


@pytest.fixture(scope="module")
def impatient(speaker: Path) -> Iterator[Server]:
    with served(speaker, limits=Limits(batch=4, connections=20, header_seconds=0.5, body_seconds=0.5)) as running:
        yield running


@pytest.mark.parametrize("kind", STALLED)
def test_a_request_that_does_not_arrive_is_closed_with_a_document(kind: str, impatient: Server) -> None:
    with sockets(impatient.port, 1, STALLED[kind]) as (one,):
        status, document, _ = answer(one) if "nobody" not in kind else (408, None, None)
        assert status == 408
        assert document is None or document["error"]["code"] == "timeout"


def test_connections_that_stall_are_closed_for_new_ones(impatient: Server) -> None:
    for sent in STALLED.values():
        with sockets(impatient.port, 60, sent) as stalled:
            started = time.monotonic()
            body = {"model": "tiny", "prompt": "ban", "max_tokens": 1}
            assert impatient.send("POST", "/v1/completions", body)[0] == 200
            assert time.monotonic() - started < 3.0  # the test of the program measures; this machine may be busy
            assert stalled


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", 400), (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nA b: c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"x" * 70_000, 431), (b"GET /" + b"x" * 70_000, 431),
        (HEADERS + b"Content-Length: x\r\n\r\n", 400), (HEADERS + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (HEADERS + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        # Requests with a second one inside, which another program may see; test_request_bounds.py has all.
        (HEADERS + b"Content-Length: 48\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEALTH, 400),
        (HEADERS + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + HEALTH, 400),
        (HEADERS.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}" + HEALTH, 400),
    ],
)  # fmt: skip
def test_what_is_not_http_gets_a_document(impatient: Server, sent: bytes, status: int) -> None:
    with sockets(impatient.port, 1, sent) as (one,):
        found, document, response = answer(one)
    assert found == status, document
    assert response.getheader("content-type") == "application/json"
    assert document["error"]["type"] in ("invalid_request_error", "server_error")


def test_too_many_connections_are_told_when_to_come_again(speaker: Path) -> None:
    limits = Limits(batch=1, waiting=1, connections=1, body_seconds=5)
    with served(speaker, limits=limits) as server, ExitStack() as stack:
        # Answers that nobody reads are not requests on their way, so only the limit of all connections ends them.
        page = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        stack.enter_context(sockets(server.port, 9, page * 1000))
        deadline = time.monotonic() + 30
        while True:
            with sockets(server.port, 1, page.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")) as (one,):
                response = http.client.HTTPResponse(one)
                response.begin()
                if response.status == 503:
                    break
            assert time.monotonic() < deadline
        assert json.loads(response.read())["error"]["code"] == "busy"
        assert response.getheader("retry-after") == "5"


# ---- the program


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def probe(port: int) -> float:
    """Seconds that a completion takes."""
    started = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps({"model": "m", "prompt": "ban", "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read()
    connection.close()
    return time.monotonic() - started


@pytest.mark.slow
def test_two_thousand_half_open_connections_lock_nobody_out(speaker: Path) -> None:
    with serving(speaker, "--name", "m") as (url, _):
        port, stop = port_of(url), threading.Event()
        probe(port)

        def stall(kind: int) -> None:
            sent = list(STALLED.values())[kind]
            while not stop.is_set():  # those that are closed come again
                with sockets(port, 500, sent) as stalled:
                    end = time.monotonic() + 12
                    while time.monotonic() < end and not stop.is_set():
                        for one in stalled:  # the slow ones go on, one byte at a time
                            with suppress(OSError):
                                one.send(b"{" if b"{" in sent else b"x") if sent else None
                        time.sleep(1)

        with ThreadPoolExecutor() as pool:
            stalling = [pool.submit(stall, kind) for kind in range(4)]
            time.sleep(2)
            taken = []
            try:
                for _ in range(60):
                    taken.append(probe(port))
                    time.sleep(1)
            finally:
                stop.set()
            for future in stalling:
                future.result()
        print("slowest completion", max(taken))
        assert max(taken) < 1.0


def stuck_template(port: int) -> ExitStack:
    held = ExitStack()
    body = json.dumps({"model": "m", "messages": chat("harm by endless")}).encode()
    ask = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    held.enter_context(sockets(port, 20, ask + b"Content-Length: %d\r\n\r\n" % len(body) + body))
    return held


def half_open(port: int) -> ExitStack:
    held = ExitStack()
    held.enter_context(sockets(port, 2000, STALLED["half the headers"]))
    return held


def unread_streams(port: int) -> ExitStack:
    held = ExitStack()
    asked = {"model": "m", "prompt": "ban", "max_tokens": 100, "stream": True, "n": 100, "logprobs": 20}
    body = json.dumps(asked).encode()
    held.enter_context(sockets(port, 5, HEADERS + b"Content-Length: %d\r\n\r\n" % len(body) + body))
    return held


@pytest.mark.slow
@pytest.mark.parametrize("state", [stuck_template, half_open, unread_streams])
def test_sigterm_ends_the_server_in_every_state(
    state: Callable[[int], ExitStack], speaker: Path, tmp_path: Path
) -> None:
    with serving(hostile(speaker, tmp_path), "--name", "m") as (url, process):
        probe(port_of(url))
        with state(port_of(url)):
            time.sleep(1)
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=30)
            print(state.__name__, time.monotonic() - started)
            assert process.returncode == 0, out
            assert time.monotonic() - started < 11.0  # ten seconds of grace, and one for a loaded machine
