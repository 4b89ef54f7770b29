"""A server answers OpenAI's client with the text that the model generates, whatever else it is asked meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crosstrain_plugins.builtin.commands.serve.server import listen
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from crosstrain.engine.runner import Runner
from crosstrain.inference.generation import Sampling, as_prompt, generate
from fixtures_server import Server, loaded, served, wait_for


@pytest.fixture(scope="module")
def server(speaker: Path) -> Iterator[Server]:
    with served(speaker) as running:
        yield running


@pytest.fixture(scope="module")
def reference(speaker: Path) -> Runner:
    """The same model, which nobody serves."""
    return loaded(speaker)[1]


def text_of(runner: Runner, tokenizer: Any, prompt: str, **sampling: Any) -> str:
    """What `evaluate --generate` says."""
    asked = as_prompt(tokenizer(prompt, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    return generate(runner, tokenizer, asked, Sampling(**sampling))[0]


@pytest.fixture(scope="module")
def words(speaker: Path) -> Any:
    return AutoTokenizer.from_pretrained(speaker)


def test_completions_are_what_the_model_generates(server: Server, reference: Runner, words: Any) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    greedy = client.completions.create(model="tiny", prompt="ban des", max_tokens=20, temperature=0)
    assert greedy.choices[0].text == text_of(reference, words, "ban des", max_new_tokens=20, temperature=0)
    assert greedy.choices[0].finish_reason == "length"
    ids = words("ban des")["input_ids"]
    assert (greedy.usage.prompt_tokens, greedy.usage.completion_tokens) == (len(ids), 20)
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0)
    assert by_ids.choices[0].text == greedy.choices[0].text
    drawn = client.completions.create(
        model="tiny", prompt="ban", max_tokens=20, temperature=0.8, top_p=0.9, seed=5, extra_body={"top_k": 40}
    )
    expected = text_of(reference, words, "ban", max_new_tokens=20, temperature=0.8, top_p=0.9, top_k=40, seed=5)
    assert drawn.choices[0].text == expected


def test_several_prompts_and_completions_are_each_what_they_are_alone(server: Server) -> None:
    client = server.client()
    asked = {"model": "tiny", "max_tokens": 12, "seed": 3}
    many = client.completions.create(prompt=["ban", "des kin"], n=6, **asked).choices
    assert [c.index for c in many] == list(range(12))
    assert len({c.text for c in many}) == 12
    for first, prompt in ((0, "ban"), (6, "des kin")):
        for n in (1, 3):
            alone = client.completions.create(prompt=prompt, n=n, **asked).choices
            assert [c.text for c in alone] == [c.text for c in many[first : first + n]]
    unseeded = [client.completions.create(prompt="ban", model="tiny").choices[0].text for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_streams_are_the_text_in_pieces(server: Server) -> None:
    client = server.client()
    asked = {"model": "tiny", "prompt": "ban", "max_tokens": 12, "seed": 4, "n": 2, "echo": True}
    whole = client.completions.create(**asked)
    texts, ends = {0: "", 1: ""}, {}
    for chunk in client.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert list(texts.values()) == [c.text for c in whole.choices]
    assert texts[0].startswith("ban")
    assert ends == {0: "length", 1: "length"}


def test_chats_are_plain_turns_without_a_template(server: Server, reference: Runner, words: Any) -> None:
    client = server.client()
    messages = [
        {"role": "system", "content": "ban"},
        {"role": "user", "content": [{"type": "text", "text": "des"}, {"type": "text", "text": " kin"}]},
        {"role": "assistant", "content": " lot "},
        {"role": "user", "content": "mut"},
    ]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 12, "seed": 4}
    whole = client.chat.completions.create(**asked)
    prompt = "System: ban\nUser: des kin\nAssistant: lot\nUser: mut\nAssistant:"
    assert whole.choices[0].message.content == text_of(reference, words, prompt, max_new_tokens=12, seed=4).lstrip()
    said, usage = "", None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
        usage = chunk.usage
        said += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert said == whole.choices[0].message.content
    assert usage == whole.usage
    assert client.chat.completions.create(**asked | {"max_completion_tokens": None}).choices[0].finish_reason


def test_stop_strings_end_the_text_before_them(server: Server) -> None:
    client = server.client()
    asked = {"model": "tiny", "prompt": "ban", "max_tokens": 40, "temperature": 0.9, "seed": 8}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[9:12]
    for stops in (stop, [whole + "beyond", stop]):
        cut = client.completions.create(stop=stops, **asked)
        assert cut.choices[0].text == whole[: whole.index(stop)]
        assert cut.choices[0].finish_reason == "stop"
        assert cut.usage.completion_tokens < 40


def test_logprobs_are_the_models(server: Server, reference: Runner, words: Any) -> None:
    client = server.client()
    text = "ban des kin lot"
    ids = words(text)["input_ids"]
    asked = {"model": "tiny", "prompt": text, "temperature": 0}
    scored = client.completions.create(max_tokens=2, echo=True, logprobs=3, **asked)
    found = scored.choices[0].logprobs
    with reference.evaluating():
        logits = torch.cat([reference.evaluate({"input_ids": torch.tensor([ids[:i]])}) for i in range(1, len(ids))])
    expected = logits.log_softmax(-1)
    assert found.tokens[: len(ids)] == [words.decode([i]) for i in ids]
    assert "".join(found.tokens) == scored.choices[0].text
    assert [
        scored.choices[0].text[o:][: len(t)] for o, t in zip(found.text_offset, found.tokens, strict=True)
    ] == found.tokens
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    # fp32 sums in another order.
    assert found.token_logprobs[1 : len(ids)] == pytest.approx(
        expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), abs=1e-5
    )
    assert max(found.top_logprobs[1].values()) == pytest.approx(expected[0].max().item(), abs=1e-5)
    only = client.completions.create(max_tokens=0, echo=True, logprobs=0, **asked)
    assert only.choices[0].text == text
    assert only.choices[0].logprobs.token_logprobs == found.token_logprobs[: len(ids)]
    assert only.usage.completion_tokens == 0
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "ban"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
        seed=0,  # which does not draw the end of the text
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 3
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= entry.top_logprobs[0].logprob for entry in content)


@pytest.mark.slow
def test_two_hundred_at_once_lose_nothing_and_change_nothing(server: Server) -> None:
    async def ask() -> list[Any]:
        client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0, timeout=120)

        async def one(i: int) -> str:
            asked: dict[str, Any] = {"model": "tiny", "prompt": f"ban {i}", "max_tokens": 3 + i % 4, "seed": i}
            if i % 2:
                return (await client.completions.create(**asked)).choices[0].text
            stream = await client.completions.create(stream=True, **asked)
            return "".join([c.choices[0].text async for c in stream])

        return await asyncio.gather(*(one(i) for i in range(200)))

    texts = asyncio.run(ask())
    assert len(texts) == 200
    for i in range(0, 200, 17):
        alone = server.client().completions.create(model="tiny", prompt=f"ban {i}", max_tokens=3 + i % 4, seed=i)
        assert texts[i] == alone.choices[0].text
    wait_for(server, running=0)
    assert server.health() == {"status": "ok", "running": 0, "waiting": 0}


def test_what_is_said_goes_out_at_once() -> None:
    """The kernel does not hold a short answer back until the client has acknowledged the one before it."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        taken, _ = listener.accept()
        with taken:
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
