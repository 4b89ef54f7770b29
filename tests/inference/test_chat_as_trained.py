"""Prompts of chats are those of training, for every kind of dataset that has conversations."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crosstrain_plugins.builtin.commands.serve.chat_format import chat_format
from crosstrain_plugins.builtin.datasets.vision.conversations import IMAGE
from crosstrain_plugins.builtin.evaluations.completions.talk import ChatSession

from crosstrain.config.load import load_config
from crosstrain.data.chat import Message
from crosstrain.data.splits import open_split
from crosstrain.inference.chat_form import ChatForm
from crosstrain.inference.encoding import Encoders
from crosstrain.utils.types import IGNORE_INDEX
from fixtures_chat import SHAPES, write_tokenizer
from fixtures_vision import MODEL, picture

ASKED = "which cat"


def seeing(folder: Path, tokenizer: Path, text: str | dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """A dataset of one annotation about one picture."""
    (folder / "entry.json").write_text(json.dumps([entry | {"image": "0.png"}]))
    picture(folder / "0.png", 0)
    processor = {"name": text} if isinstance(text, str) else text
    eyes = {"name": "image_eval", "image_size": 16}
    return {
        "name": "instructions",
        "annotations": str(folder / "entry.json"),
        "images": str(folder),
        "tokenizer": str(tokenizer),
        "image_tokens": 4,
        "vis_processor": {"train": eyes, "eval": eyes},
        "text_processor": {"train": processor, "eval": processor},
    }


def project(folder: Path, **datasets: Any) -> Any:
    run = {"output_dir": str(folder / "out"), "max_iters": 1, "micro_batch_size": 1}
    return load_config({"model": MODEL, "datasets": datasets, "run": run})


def asked_in_training(config: Any) -> dict[str, Any]:
    """The first sample, up to where the assistant's words begin."""
    sample = open_split(config, "train").get(0, np.random.default_rng(0))
    start = int(np.argmax(sample["labels"] != IGNORE_INDEX)) + 1
    return sample | {"input_ids": sample["input_ids"][:start]}


TURNS = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": "mat"}, {"from": "human", "value": "why"}]
KINDS: dict[str, tuple[str | dict[str, Any], dict[str, Any]]] = {
    "dialogue": ("dialogue", {"conversations": [*TURNS, {"from": "gpt", "value": "so"}]}),
    "an image at the end": (
        "dialogue", {"conversations": [{"from": "human", "value": f"{ASKED}\n{IMAGE}"}, TURNS[1]]}
    ),
    "instruction": ("base_instruction", {"instruction": "<Img><ImageHere></Img>\n" + ASKED, "output": "mat"}),
    "told nothing": ({"name": "dialogue", "system": None}, {"conversations": TURNS[:2]}),
    "questions": (
        {"name": "vqa", "system": "the mat", "caption_key": None},
        {"questions": [{"question": ASKED, "answer": "cat"}], "caption": "a mat"},
    ),
    "captions": ({"name": "captions", "prompts": [ASKED], "style": "chat"}, {"caption": "a mat"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_chat_begins_as_a_sample_of_training(kind: str, mixed: bool, words: Path, tmp_path: Path) -> None:
    data = seeing(tmp_path, words, *KINDS[kind])
    config = project(tmp_path, **({"first": data, "second": data} if mixed else {"only": data}))
    learned = asked_in_training(config)
    talk = ChatSession(ChatForm.of_training(config, words), [str(tmp_path / "0.png")])
    given = talk.ask(f"{ASKED}\n{IMAGE}" if kind == "an image at the end" else ASKED)
    assert given["input_ids"].tolist() == learned["input_ids"].tolist()
    assert np.array_equal(given["pixel_values"], learned["pixel_values"])
    own = talk.form.prompt([Message("system", "sat"), Message("user", ASKED)], [])["input_ids"]
    assert (own == given["input_ids"][0]).sum() == 3, "another system prompt takes its place"


def test_the_first_of_parts_that_ask_in_several_ways_is_named(
    words: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, silent = (
        seeing(tmp_path, words, {"name": "dialogue", "system": system}, KINDS["dialogue"][1])
        for system in ("sat", None)
    )
    config = project(tmp_path, b=silent, a=told)
    with caplog.at_level(logging.WARNING, "crosstrain"):
        given = ChatSession(ChatForm.of_training(config, words), []).ask("cat")
    alone = ChatSession(ChatForm.of_training(project(tmp_path, c=silent), words), []).ask("cat")
    assert given["input_ids"].tolist() == alone["input_ids"].tolist()
    assert [record.getMessage() for record in caplog.records] == [
        "the mixture's parts have different conversation formats; chats use the format of b"
    ]


@pytest.mark.slow
def test_a_text_chat_begins_as_a_sample_of_training(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "mat"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    tokenizer = write_tokenizer(tmp_path / "tokenizer", SHAPES["chatml"].template)
    data = {"name": "chat", "path": str(tmp_path / "chats.jsonl"), "tokenizer": str(tokenizer), "seq_length": 64}
    # A template of one's own has a system prompt, and is stored with the checkpoint.
    template = "<|im_start|>system\nsat<|im_end|>\n" + SHAPES["chatml"].template
    config = project(tmp_path, chats=data | {"chat_template": template})
    folder = open_split(config, "train").tokenizer_path
    assert folder is not None
    encoders = Encoders(folder)
    try:
        assert ChatForm.possible(config, folder, encoders) is None
        prompt = chat_format(encoders.tokenizer, None, encoders).make([Message("user", ASKED)], [])
    finally:
        encoders.close()
    assert prompt.ids == asked_in_training(config)["input_ids"].tolist()
