"""Targets of a conversation are the assistant's words and the token that ends its turn, under any template, or none."""

from __future__ import annotations

import json
import random
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.prepare.chat_template import ChatError, ChatTemplate, EncodedChat

from fixtures_chat import SHAPES, Shape, conversation, write_tokenizer

CONVERSATIONS = 200
USABLE = [name for name, shape in SHAPES.items() if shape.refused is None]


def targets(encoded: EncodedChat) -> list[list[int]]:
    """The runs of target tokens."""
    pairs = zip(encoded.ids, encoded.is_target, strict=True)
    return [[token for token, _ in run] for learned, run in groupby(pairs, itemgetter(1)) if learned]


def expected(shape: Shape, message: dict[str, Any]) -> str:
    words = message["content"] or ""
    if shape.strips:
        words = words.strip()
    if thought := message.get("reasoning_content"):
        words = f"<think>\n{thought}\n</think>\n\n{words}"
    for call in message.get("tool_calls", ()):
        words += f"\n<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
    return words + shape.end


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("name", USABLE)
def test_targets_are_exactly_the_assistants_words_and_the_end_of_its_turn(
    tmp_path: Path, name: str, metaspace: bool
) -> None:
    shape, rng = SHAPES[name], random.Random(name)
    template = ChatTemplate(write_tokenizer(tmp_path / "t", shape.template, metaspace=metaspace))
    refused = 0
    for _ in range(CONVERSATIONS):
        messages = conversation(rng, shape)
        own = [message for message in messages if message["role"] == "assistant"]
        for train_on, wanted in (("assistant", own), ("last", own[-1:])):
            try:
                encoded = template.encode(messages, None, train_on)
            except ChatError as error:
                if not metaspace or "a token crosses" not in str(error):
                    raise
                refused += 1
                continue
            found = [template.backend.decode(ids, skip_special_tokens=False) for ids in targets(encoded)]
            assert [text.strip(" ") for text in found] == [expected(shape, message).strip(" ") for message in wanted]
            if not metaspace:
                text = template.render(messages)
                assert template.backend.decode(encoded.ids, skip_special_tokens=False) == text
    assert refused < CONVERSATIONS, "most conversations are used"


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in USABLE])
def test_a_template_that_hides_what_the_assistant_writes_is_refused(tmp_path: Path, name: str) -> None:
    shape, rng = SHAPES[name], random.Random(name)
    template = ChatTemplate(write_tokenizer(tmp_path / "t", shape.template))
    assert shape.refused is not None
    for _ in range(20):
        with pytest.raises(ChatError, match=shape.refused):
            template.encode(conversation(rng, shape, turns=3), None)


def test_a_template_that_drops_earlier_thoughts_trains_the_last_turn(tmp_path: Path) -> None:
    shape, rng = SHAPES["thoughts kept in the last turn alone"], random.Random(0)
    template = ChatTemplate(write_tokenizer(tmp_path / "t", shape.template))
    for _ in range(50):
        messages = conversation(rng, shape)
        (found,) = targets(template.encode(messages, None, "last"))
        thought = messages[-1].get("reasoning_content", "")
        words = f"<think>\n{thought}\n</think>\n\n{messages[-1]['content']}<|im_end|>"
        assert template.backend.decode(found, skip_special_tokens=False) == words


def test_the_prompt_of_an_answer_is_the_beginning_of_the_trained_sequence(tmp_path: Path) -> None:
    for name in USABLE:
        shape, rng = SHAPES[name], random.Random(name)
        template = ChatTemplate(write_tokenizer(tmp_path / name, shape.template))
        for _ in range(20):
            messages = conversation(rng, shape, turns=2)
            encoded = template.encode(messages, None, "last")
            asked = template.render(messages[:-1], answering=True)
            prompt = template.backend.encode(asked, add_special_tokens=False).ids
            assert encoded.ids[: len(prompt)] == prompt, name
            assert encoded.is_target.index(True) == len(prompt)


def test_words_with_special_tokens_are_refused(tmp_path: Path) -> None:
    template = ChatTemplate(write_tokenizer(tmp_path / "t", SHAPES["chatml"].template))
    messages = [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c"}]
    with pytest.raises(ChatError, match=r"turn 1 contains the special token <\|im_end\|>"):
        template.encode(messages, None)


def test_all_tokens_can_be_targets(tmp_path: Path) -> None:
    template = ChatTemplate(write_tokenizer(tmp_path / "t", SHAPES["chatml"].template))
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
    encoded = template.encode(messages, None, "all")
    assert encoded.is_target == [False] + [True] * (len(encoded.ids) - 1)
