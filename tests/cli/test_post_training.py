"""A user's way from a pretrained folder to a served chat: every step through the command line."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ENVIRONMENT, ROOT, Workspace, kill
from fixtures_chat import SHAPES, write_tokenizer

PLAIN = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")}
SAYS = {"red": "hello", "blue": "world"}


def crosstrain(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "crosstrain", *arguments],
        cwd=folder,
        env=PLAIN,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@pytest.fixture
def chats(workspace: Workspace) -> Workspace:
    """A project that tunes a small model for chats, and its data."""
    rng = random.Random(0)
    write_tokenizer(workspace.path / "tokenizer", SHAPES["chatml"].template)
    asked = [rng.choice(list(SAYS)) for _ in range(64)]
    write(
        workspace.path,
        "chats.jsonl",
        [
            {"messages": [{"role": "user", "content": colour}, {"role": "assistant", "content": SAYS[colour]}]}
            for colour in asked
        ],
    )
    write(
        workspace.path,
        "pairs.jsonl",
        [{"prompt": colour, "chosen": SAYS[colour], "rejected": f"{SAYS[colour]} and more"} for colour in asked],
    )
    workspace.config["model"] |= {"vocab_size": 512, "n_positions": 64, "dropout": 0.0}
    workspace.config["datasets"] = {
        "chats": {"name": "chat", "path": "chats.jsonl", "tokenizer": "tokenizer", "seq_length": 64}
    }
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return workspace


@pytest.mark.slow
def test_what_a_sample_trains_is_shown(chats: Workspace) -> None:
    shown = crosstrain(chats.path, "samples", "--cfg-path", "project.yaml")
    title, text = shown.split("\n", 1)
    found = re.fullmatch(r"sample 0 of train, index (\d+) of 64, chats.jsonl:(\d+)", title)
    assert found
    assert int(found[2]) == int(found[1]) + 1
    said = SAYS["red" if "red" in text else "blue"]
    assert f"<|im_start|>assistant\n«{said}<|im_end|>»" in text


@pytest.mark.slow
def test_from_pretrained_weights_to_a_served_chat(chats: Workspace) -> None:
    home = chats.path
    # Stands for somebody's pretrained folder: it knows these words, and answers the wrong way round.
    wrong = {"red": "world", "blue": "hello"}
    write(home, "wrong.jsonl", [{"prompt": colour, "completion": wrong[colour]} for colour in [*SAYS] * 32])
    chats.train("base", "datasets.chats.path=wrong.jsonl", "datasets.chats.train_on=all", "run.max_iters=60")
    crosstrain(home, "export", "--checkpoint", "base", "--output", "pretrained")
    model = ("model={arch: gpt2, pretrained: pretrained, dropout: 0.0, adapter: {name: lora, rank: 8, alpha: 32}}",)
    tuned = chats.train(
        "tuned", *model, "run.runner=zero2", "run.max_iters=60", "run.init_lr=0.02", "run.grad_norm_clip=0", nproc=2
    )
    assert tuned.rows[-1]["loss"] < 0.3 < tuned.rows[0]["loss"]

    model = ("model={arch: gpt2, pretrained: pretrained, dropout: 0.0, adapter: {name: lora, pretrained: tuned}}",)
    chats.config["datasets"] = {
        "pairs": {"name": "preference", "path": "pairs.jsonl", "tokenizer": "tokenizer", "seq_length": 64}
    }
    chats.project.write_text(yaml.safe_dump(chats.config))
    preferred = chats.train(
        "preferred", *model, "run.objective={name: dpo, beta: 0.5}", "run.max_iters=20", "run.init_lr=5e-4"
    )
    assert preferred.rows[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert preferred.rows[-1]["rewards/accuracies"] == 1.0

    ask = ("--chat", "--generate", "red", "--temperature", "0")
    answer = crosstrain(home, "evaluate", "--checkpoint", "preferred", *ask)
    assert "hello\n" in answer
    crosstrain(home, "export", "--checkpoint", "preferred", "--output", "chat")
    opened = AutoModelForCausalLM.from_pretrained(home / "chat")
    tokenizer = AutoTokenizer.from_pretrained(home / "chat")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "red"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = opened.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]) == "hello<|im_end|>"  # it stops by itself
    assert _served(home, "preferred", "red") == "hello"
    assert torch.isfinite(opened(**prompt).logits).all()


@pytest.mark.slow
def test_the_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    """All of docs/post-training.md, as they stand there but for the length of the trainings."""
    (tmp_path / "projects").symlink_to(ROOT / "projects")
    page = (ROOT / "docs" / "post-training.md").read_text()
    commands = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(commands) == 9
    for command in commands:
        program, *arguments = shlex.split(command)
        if program == "python":
            arguments = ["train", *arguments[1:], "--options", "run.max_epoch=null", "run.max_iters=8"]
        if arguments[0] == "serve":
            assert _served(tmp_path, arguments[-1], "What does Python's os.getcwd do?") is not None
        else:
            crosstrain(tmp_path, *arguments)


def _served(folder: Path, checkpoint: str, said: str) -> str:
    """The answer of a server to one message."""
    server = subprocess.Popen(
        [sys.executable, "-m", "crosstrain", "serve", "--checkpoint", checkpoint, "--port", "0"],
        cwd=folder,
        env=PLAIN,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.]+:\d+", line)))
        turns = [{"role": "user", "content": said}]
        body = {"model": Path(checkpoint).name, "messages": turns, "temperature": 0, "max_tokens": 20}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    finally:
        kill(server)
