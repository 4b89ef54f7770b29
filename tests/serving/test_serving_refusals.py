"""A server refuses what it cannot do, says why, and goes on: parameters, statuses, limits, keys, clients that leave."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from crosstrain_plugins.builtin.commands.serve.limits import Limits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from crosstrain.cli.main import main
from crosstrain.data.tokenizer import END_OF_TEXT
from fixtures_server import Server, served, wait_for


@pytest.fixture(scope="module")
def server(speaker: Path) -> Iterator[Server]:
    with served(speaker) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(speaker: Path) -> Iterator[Server]:
    """One that is soon full, and soon late; it wants a key."""
    limits = Limits(batch=1, waiting=2, seconds=30, body_bytes=20_000, body_seconds=0.5)
    with served(speaker, limits=limits, key="a key") as running:
        yield running


COMPLETION = {"model": "tiny", "prompt": "ban"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "ban"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"), ({"prompt": 3}, "prompt"), ({"prompt": [303]}, "prompt"),
        ({"prompt": [-1]}, "prompt"), ({"prompt": ["a", 3]}, "prompt[1]"), ({"prompt": "ban " * 130}, "prompt"),
        ({"prompt": "a" * 19_000}, "prompt"), ({"prompt": ["a"] * 65}, "prompt"), ({"max_tokens": 128}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "3"}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"), ({"n": 10**6}, "n"), ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"stop": ""}, "stop"), ({"stop": ["a"] * 17}, "stop"), ({"stop": [3]}, "stop[0]"), ({"seed": 2**70}, "seed"),
        ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"), ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": False}, "frequency_penalty"), ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_p": 0.1}, "min_p"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"), ({"stream": 1}, "stream"),
    ],
)  # fmt: skip
def test_a_parameter_that_cannot_be_is_named(server: Server, change: dict[str, Any], param: str) -> None:
    status, document, _ = server.send("POST", "/v1/completions", COMPLETION | change)
    assert (status, document["error"]["param"]) == (400, param), document
    assert document["error"]["type"] == "invalid_request_error"
    assert document["error"]["message"].startswith(param.split("[")[0])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"), ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"), ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"echo": True}, "echo"), ({"store": True}, "store"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"), ({"verbosity": "low"}, "verbosity"),
    ],
)  # fmt: skip
def test_a_part_of_a_chat_that_cannot_be_is_named(server: Server, change: dict[str, Any], param: str) -> None:
    status, document, _ = server.send("POST", "/v1/chat/completions", CHAT | change)
    assert (status, document["error"]["param"]) == (400, param), document


@pytest.mark.parametrize("flag", ["--timeout", "--header-timeout"])
def test_times_are_above_zero(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("0", "-1", "nan", "soon"):
        assert main(["serve", "--checkpoint", "none", f"{flag}={value}"]) == 1
        assert f"argument {flag}: invalid seconds value: '{value}'" in capsys.readouterr().err


def test_parameters_that_change_nothing_are_taken(server: Server) -> None:
    neutral = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "n": 1, "stop": None,
        "max_tokens": 2, "stream": False,
    }  # fmt: skip
    assert server.send("POST", "/v1/completions", COMPLETION | neutral | {"best_of": 1, "suffix": None})[0] == 200
    more = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "service_tier": "auto"}
    assert server.send("POST", "/v1/chat/completions", CHAT | neutral | more)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/v2/models", None, {}, 404), ("GET", "/v1/models/gpt", None, {}, 404),
        ("POST", "/v1/completions", COMPLETION | {"model": "gpt"}, {}, 404), ("GET", "/v1/completions", None, {}, 405),
        ("DELETE", "/v1/models", None, {}, 405), ("POST", "/v1/completions", b"{", {}, 400),
        ("POST", "/v1/completions", b"[]", {}, 400), ("POST", "/v1/completions", b"", {}, 400),
        ("POST", "/v1/completions", b"\xff", {}, 400), ("POST", "/v1/completions", b"[" * 9000, {}, 400),
        ("POST", "/v1/completions", b'{"model":"tiny","prompt":"\\ud800"}', {}, 400),
        ("POST", "/v1/completions", b'{"model":"tiny","prompt":"a","temperature":NaN}', {}, 400),
        ("POST", "/v1/completions", COMPLETION, {"Content-Type": "text/plain"}, 415),
        ("GET", "/v1/models", None, {"Host": "evil.example"}, 403), ("GET", "/", None, {"Host": "[x"}, 403),
    ],
)  # fmt: skip
def test_statuses(server: Server, method: str, path: str, body: Any, headers: dict[str, str], status: int) -> None:
    found, document, _ = server.send(method, path, body, headers)
    assert found == status, document
    assert document["error"]["message"]


def test_a_key_is_asked_for(guarded: Server) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "a key"},
        {"Authorization": "Bearer \xe9"},
    ):
        status, document, told = guarded.send("POST", "/v1/completions", COMPLETION, headers)
        assert (status, document["error"]["code"]) == (401, "invalid_api_key")
        assert told["www-authenticate"] == "Bearer"
        assert guarded.send("GET", "/v1/models", None, headers)[0] == 401
    assert guarded.client().models.list().data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError):
        guarded.client().with_options(api_key="other").models.list()


def test_what_is_too_large_or_too_slow_is_refused(guarded: Server) -> None:
    headers = {"Authorization": "Bearer a key"}
    status, document, _ = guarded.send("POST", "/v1/completions", b" " * 20_001, headers)
    assert (status, document["error"]["code"]) == (413, "body_too_large")
    chunked = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
    chunked.request(
        "POST",
        "/v1/completions",
        iter([b" " * 15_000] * 2),
        headers | {"Content-Type": "application/json"},
        encode_chunked=True,
    )
    assert chunked.getresponse().status == 413
    slow = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
    slow.putrequest("POST", "/v1/completions")
    for key, value in (headers | {"Content-Type": "application/json", "Content-Length": "100"}).items():
        slow.putheader(key, value)
    slow.endheaders(b"{")
    assert slow.getresponse().status == 408


def stream(server: Server, key: str | None = None, **more: Any) -> http.client.HTTPResponse:
    """A stream of which the first token has come. Closing it is what a client does that goes away."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = COMPLETION | {"stream": True, "max_tokens": 120, "logit_bias": None} | more
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.readline()
    connection.sock.close() if connection.sock else None
    return response


def slowly(server: Server, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Let every forward take longer, and no text end before its last token: sampling has no seed here."""
    evaluate = server.runner.evaluate
    end = Tokenizer.from_file(str(server.checkpoint / "tokenizer.json")).token_to_id(END_OF_TEXT)

    def slow(batch: Any) -> torch.Tensor:
        time.sleep(seconds)
        logits = evaluate(batch)
        logits[:, end] = -math.inf
        return logits

    monkeypatch.setattr(server.runner, "evaluate", slow)


def test_a_full_server_says_when_to_come_again_and_a_reader_who_leaves_frees_a_place(
    guarded: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(guarded, monkeypatch)
    headers = {"Authorization": "Bearer a key"}
    reading = [stream(guarded)]
    waiting = [
        threading.Thread(target=guarded.send, args=("POST", "/v1/completions", COMPLETION, headers)) for _ in "ab"
    ]
    for thread in waiting:
        thread.start()
    wait_for(guarded, running=1, waiting=2)
    status, document, told = guarded.send("POST", "/v1/completions", COMPLETION, headers)
    assert (status, document["error"]["type"]) == (429, "rate_limit_error")
    assert int(told["retry-after"]) >= 1
    started = time.monotonic()
    reading.pop().close()
    for thread in waiting:
        thread.join()
    # 120 tokens of 20 ms would have come first.
    assert time.monotonic() - started < 2.0
    wait_for(guarded, running=0, waiting=0)


def test_a_client_that_leaves_without_reading_frees_its_place(guarded: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(guarded, monkeypatch)
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer a key"}
    connection.request("POST", "/v1/completions", json.dumps(COMPLETION | {"max_tokens": 120}).encode(), headers)
    wait_for(guarded, running=1)
    connection.close()
    wait_for(guarded, seconds=1.5, running=0)


def test_what_takes_too_long_ends(speaker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(speaker, limits=Limits(batch=1, seconds=0.5)) as server:
        slowly(server, monkeypatch)
        status, document, _ = server.send("POST", "/v1/completions", COMPLETION | {"max_tokens": 120})
        assert (status, document["error"]["code"]) == (504, "timeout")
        with pytest.raises(openai.APIError, match=r"did not finish within 0\.5 seconds"):
            list(server.client().completions.create(model="tiny", prompt="a", max_tokens=120, stream=True))
        assert server.send("POST", "/v1/completions", COMPLETION | {"max_tokens": 1})[0] == 200


def test_logits_that_are_no_numbers_fail_one_request_and_not_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.runner, "evaluate", lambda batch: torch.full((len(batch["input_ids"]), 303), math.nan))
        for temperature in (0, 1):
            status, document, _ = server.send("POST", "/v1/completions", COMPLETION | {"temperature": temperature})
            assert (status, document["error"]["type"]) == (500, "server_error")
            assert "logits contain NaN" in document["error"]["message"]
    assert server.send("POST", "/v1/completions", COMPLETION)[0] == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "stop",
        "seed",
        "echo",
        "logprobs",
        "top_logprobs",
        "stream",
        "stream_options",
        "user",
        "tools",
        "logit_bias",
        "suffix",
        "role",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.booleans(), st.dictionaries(KEYS, JSON, max_size=3) | st.binary(max_size=40), st.data())
def test_nothing_that_is_sent_breaks_it(server: Server, chat: bool, given: Any, data: st.DataObject) -> None:
    path, base = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", COMPLETION)
    if isinstance(given, dict):
        body = base | {"max_tokens": 2} | given
        if chat and data.draw(st.booleans()):
            message = {"role": "user", "content": data.draw(JSON)} | data.draw(st.dictionaries(KEYS, JSON, max_size=1))
            body["messages"] = [message]
    else:
        body = given
    status, document, _ = server.send("POST", path, body, seconds=20)
    assert status in (200, 400, 404), document
    if status != 200:
        assert document["error"]["message"]
        json.dumps(document)
