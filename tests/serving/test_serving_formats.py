"""Chats in the format that a model knows, images among the words; and every runner answers alike."""

from __future__ import annotations

import base64
import io
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from crosstrain_plugins.builtin.commands.serve.limits import Limits
from crosstrain_plugins.builtin.evaluations.completions.talk import ChatSession
from PIL import Image
from transformers import AutoTokenizer

from conftest import ENVIRONMENT
from crosstrain.config.load import load_config
from crosstrain.data.splits import prepare_data
from crosstrain.inference.chat_form import ChatForm
from crosstrain.inference.generation import Sampling, generate
from fixtures_ranks import train
from fixtures_server import Server, loaded, served, serving
from fixtures_vision import options, picture, shapes, write_project

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<says>"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model that sees."""
    folder = tmp_path_factory.mktemp("seeing")
    project = write_project(folder / "project.yaml", shapes(folder))
    prepare_data(load_config(project))
    return train(project, "out", *options({"run.max_iters": 2})).checkpoint(2)


@pytest.fixture(scope="module")
def eyes(seeing: Path) -> Iterator[Server]:
    limits = Limits(batch=4, images=2, image_pixels=10_000)
    with served(seeing, limits=limits, name="eyes") as running:
        yield running


def data_url(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def seen(*parts: str | Path) -> list[dict[str, Any]]:
    """A user's words and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def test_images_are_seen_as_in_training(eyes: Server, seeing: Path, tmp_path: Path) -> None:
    files = [picture(tmp_path / f"{i}.png", i) for i in range(2)]
    config, runner = loaded(seeing)
    talk = ChatSession(ChatForm.of_training(config, seeing), [str(file) for file in files])
    prompt = talk.ask("what colour is it")
    tokenizer = AutoTokenizer.from_pretrained(seeing)
    (expected,) = generate(runner, tokenizer, prompt, Sampling(max_new_tokens=5, temperature=0), ends=talk.form.ends)
    client = eyes.client()
    asked: dict[str, Any] = {"model": "eyes", "max_tokens": 5, "temperature": 0}
    messages: Any = seen(*files, "what colour is it")
    answer = client.chat.completions.create(messages=messages, **asked)
    assert answer.choices[0].message.content == expected.strip()
    assert answer.usage.prompt_tokens == len(prompt["input_ids"])
    stream = client.chat.completions.create(messages=messages, stream=True, **asked)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == answer.choices[0].message.content
    logprobs = [
        client.chat.completions.create(messages=m, logprobs=True, **asked).choices[0].logprobs.content[0].logprob
        for m in (messages, seen(files[1], files[0], "what colour is it"), seen("what colour is it"))
    ]
    assert len(set(logprobs)) == 3, "what it says depends on the images and their order"
    # A written mark of an image is only text.
    forged = client.chat.completions.create(messages=seen(files[0], "<image> what colour is it"), **asked)
    assert forged.usage.prompt_tokens < answer.usage.prompt_tokens
    assert client.completions.create(prompt="red", **asked).usage.completion_tokens <= 5


def test_images_are_never_fetched_and_must_be_images(eyes: Server, tmp_path: Path) -> None:
    file = picture(tmp_path / "0.png", 0)
    large = tmp_path / "large.png"
    Image.new("RGB", (101, 100)).save(large)
    good = data_url(file)
    svg = base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode()
    bomb = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(bomb, "PNG")
    for url, code in {
        "http://127.0.0.1:1/x.png": "invalid_image_url",
        "file:///etc/passwd": "invalid_image_url",
        str(file): "invalid_image_url",
        "data:image/png,abc": "invalid_base64_image",
        "data:": "invalid_image_url",
        "data:image/png;base64,***": "invalid_base64_image",
        "data:image/png;base64,": "invalid_image",
        good[:-60]: "invalid_image",
        f"data:image/svg+xml;base64,{svg}": "invalid_image",
        "data:image/png;base64,\N{SNOWMAN}": "invalid_base64_image",
        data_url(large): "image_too_large",
        "data:image/png;base64," + base64.b64encode(bomb.getvalue()).decode(): "image_too_large",
    }.items():
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        body = {"model": "eyes", "messages": messages}
        status, document, _ = eyes.send("POST", "/v1/chat/completions", body)
        assert (status, document["error"]["code"]) == (400, code), (url[:60], document)
        assert document["error"]["param"] == "messages[0].content[0].image_url.url"
    with pytest.raises(openai.BadRequestError, match="3 images; at most 2"):
        eyes.client().chat.completions.create(model="eyes", messages=seen(file, file, file))


def test_a_chat_template_is_used_where_there_is_one(speaker: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(speaker, tmp_path / "step_000030"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with served(folder) as server:
        client = server.client()
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "temperature": 0}
        chat = client.chat.completions.create(messages=[{"role": "user", "content": "ban"}], **asked)
        text = client.completions.create(prompt="<user>ban<says>", **asked)
        assert chat.choices[0].message.content == text.choices[0].text
        assert chat.usage == text.usage
    (folder / "chat_template.jinja").write_text("{{ raise_exception('users first') }}")
    with served(folder) as server, pytest.raises(openai.BadRequestError, match="users first"):
        server.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


def ask(url: str, **more: Any) -> list[str]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)
    name = client.models.list().data[0].id
    return [
        client.completions.create(model=name, prompt=prompt, max_tokens=10, seed=2, **more).choices[0].text
        for prompt in ("ban", "des kin")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["ddp@1", "ddp@2", "fsdp@2", "zero3@2", "megatron_tp2@2", "megatron_pp2@2"])
def test_every_runner_answers_alike_and_ends_when_told(speaker: Path, runner: str) -> None:
    with served(speaker) as server:
        expected = ask(f"http://127.0.0.1:{server.port}")
    name, size = runner.split("@")
    with serving(speaker, "--nproc-per-node", size, "--options", f"run.runner={name}") as (url, process):
        assert ask(url) == expected
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out
        assert "stopping" in out


@pytest.mark.slow
def test_what_runs_is_finished_before_the_end(speaker: Path) -> None:
    with serving(speaker) as (url, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        stream = client.completions.create(model="speaker", prompt="ban", max_tokens=30, stream=True)
        next(stream)
        process.send_signal(signal.SIGINT)
        assert [c.choices[0].finish_reason for c in stream][-1] in ("length", "stop")
        assert process.wait(60) == 0


@pytest.mark.slow
def test_beyond_this_machine_without_a_key_is_worth_a_warning(speaker: Path) -> None:
    with serving(speaker, "--host", "0.0.0.0") as (_, process):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    place = ["serve", "--checkpoint", str(speaker), "--port"]
    for arguments, complaint in (
        (["70000"], "port must be 0-65535"),
        (["0", "--host", "192.0.2.1"], "cannot listen on this address"),
        (["0", "--api-key", ""], "expected a key that is not empty"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "crosstrain", *place, *arguments], env=ENVIRONMENT, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert complaint in done.stderr
