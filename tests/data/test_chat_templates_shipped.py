# ruff: noqa: E501, RUF001 - templates
"""The chat templates in configs/chat_templates: each family's published format, and marks on the assistant's words."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.prepare.chat_template import (
    ChatError,
    ChatTemplate,
    lacking,
    load_with_template,
    template_library,
)
from tokenizers import Tokenizer

from crosstrain.utils.errors import DataError
from fixtures_chat import SHAPES, write_tokenizer

Q1 = {"role": "user", "content": "one?"}
A1 = {"role": "assistant", "content": "1."}
Q2 = {"role": "user", "content": "two?"}
A2 = {"role": "assistant", "content": "2."}
SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = [SYSTEM, Q1, A1, Q2, A2]
THOUGHT = [Q1, A1 | {"reasoning_content": "easy"}, Q2, A2 | {"reasoning_content": "hard"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}, "id": "abcdefghi"}
CALLED = [
    Q1,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
    A1,
]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}

# Templates by name: the published form of PLAIN, in which « and » enclose what the model writes itself.
PUBLISHED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n«1.<|im_end|>»\n"
        "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n«2.<|im_end|>»\n"
    ),
    "qwen3": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\n1.<|im_end|>»\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\n2.<|im_end|>»\n"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\none?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«1.<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\ntwo?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "«2.<|eot_id|>»"
    ),
    "llama3_1": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\none?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«1.<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\ntwo?"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«2.<|eot_id|>»"
    ),
    "mistral": "<s>[INST] Be brief.\n\none?[/INST]« 1.</s>»[INST] two?[/INST]« 2.</s>»",
    "mistral_v7": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]one?[/INST]«1.</s>»[INST]two?[/INST]«2.</s>»",
    "gemma": (
        "<bos><start_of_turn>user\nBe brief.\n\none?<end_of_turn>\n<start_of_turn>model\n«1.<end_of_turn>»\n"
        "<start_of_turn>user\ntwo?<end_of_turn>\n<start_of_turn>model\n«2.<end_of_turn>»\n"
    ),
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\none?<|end|>\n<|assistant|>\n«1.<|end|>»\n<|user|>\ntwo?<|end|>\n"
        "<|assistant|>\n«2.<|end|>»\n"
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>one?<|im_end|><|im_start|>assistant"
        "<|im_sep|>«1.<|im_end|>»<|im_start|>user<|im_sep|>two?<|im_end|><|im_start|>assistant<|im_sep|>«2.<|im_end|>»"
    ),
    "deepseek_v3": (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>one?<｜Assistant｜>«1.<｜end▁of▁sentence｜>»<｜User｜>two?<｜Assistant｜>"
        "«2.<｜end▁of▁sentence｜>»"
    ),
    "deepseek_r1": (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>one?<｜Assistant｜><think>\n«\n</think>\n\n1.<｜end▁of▁sentence｜>»"
        "<｜User｜>two?<｜Assistant｜><think>\n«\n</think>\n\n2.<｜end▁of▁sentence｜>»"
    ),
    "glm4": (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\none?<|assistant|>«\n1.<|user|>»\ntwo?<|assistant|>«\n2.<|user|>»"
    ),
    "command_r": (
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
        "<|USER_TOKEN|>one?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«1.<|END_OF_TURN_TOKEN|>»"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>two?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        "«2.<|END_OF_TURN_TOKEN|>»"
    ),
}  # fmt: skip
PUBLISHED |= dict.fromkeys(("qwen2_5", "smollm2"), PUBLISHED["chatml"])


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens of all families."""
    folder = write_tokenizer(tmp_path_factory.mktemp("everything") / "t", SHAPES["chatml"].template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for template in template_library().values():
        tokenizer.add_special_tokens(lacking(tokenizer, template))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def marked(folder: Path, name: str, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    """The rendered conversation, by its tokens, with those that are learned between « and »."""
    template = ChatTemplate(folder)
    template.tokenizer.chat_template = template_library()[name]
    encoded = template.encode(messages, tools)
    text = ""
    for learned, run in groupby(zip(encoded.ids, encoded.is_target, strict=True), itemgetter(1)):
        part = template.backend.decode([token for token, _ in run], skip_special_tokens=False)
        text += f"«{part}»" if learned else part
    assert text.replace("«", "").replace("»", "") == template.render(messages, tools)
    return text


def test_the_library_has_these_templates() -> None:
    assert sorted(template_library()) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_template_renders_the_published_format_and_marks_the_assistants_words(everything: Path, name: str) -> None:
    assert marked(everything, name, PLAIN) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_marked_words_begin_where_the_prompt_for_an_answer_ends(everything: Path, name: str) -> None:
    template = ChatTemplate(everything)
    template.tokenizer.chat_template = template_library()[name]
    for messages in (PLAIN[:3], PLAIN, THOUGHT):
        prompt = template.render(messages[:-1], answering=True)
        assert prompt == marked(everything, name, messages).rpartition("«")[0].replace("«", "").replace("»", "")


@pytest.mark.parametrize("name", PUBLISHED)
def test_thoughts_of_all_turns_are_learned(everything: Path, name: str) -> None:
    parts = marked(everything, name, THOUGHT).split("«")[1:]
    for part, thought, words in zip(parts, ("easy", "hard"), ("1.", "2."), strict=True):
        said = part.partition("»")[0].removeprefix("<think>\n").strip()
        assert said.startswith(("<think>\n" + thought, thought))
        assert f"{thought}\n</think>\n\n{words}" in said


CALLS = {
    **dict.fromkeys(
        ("chatml", "qwen2_5", "smollm2"), '«<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call><|im_end|>»'
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n«1.<|im_end|>»\n"
    ),
    "qwen3": '«<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call><|im_end|>»'
    "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    "«<think>\n\n</think>\n\n1.<|im_end|>»\n",
    "llama3_1": '«{"name": "add", "parameters": {"a": 1, "b": "x"}}<|eot_id|>»<|start_header_id|>ipython<|end_header_id|>\n\n'
    '"3"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«1.<|eot_id|>»',
    "mistral": '[INST] one?[/INST]«[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}, "id": "abcdefghi"}]</s>»'
    '[TOOL_RESULTS] {"content": 3, "call_id": "abcdefghi"}[/TOOL_RESULTS]« 1.</s>»',
    "deepseek_v3": "<｜Assistant｜>«<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>»<｜tool▁outputs▁begin｜>'
    "<｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>«1.<｜end▁of▁sentence｜>»",
    "glm4": '<|assistant|>«add\n{"a": 1, "b": "x"}<|observation|>»\n3<|assistant|>«\n1.<|user|>»',
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_of_tools_are_written_in_the_familys_form_or_refused(everything: Path, name: str) -> None:
    if name in CALLS:
        text = marked(everything, name, CALLED, [TOOL])
        assert text.endswith(CALLS[name])
        assert '"description": "Adds."' in text or name == "deepseek_v3"
    elif name != "deepseek_r1":
        with pytest.raises(ChatError, match=r"no turn of tool|leaves out thoughts or tool calls"):
            marked(everything, name, CALLED, [TOOL])


def test_default_system_turns(everything: Path) -> None:
    for name, text in {
        "qwen2_5": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    }.items():
        assert marked(everything, name, [Q1, A1]).startswith(f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user")


@pytest.mark.usefixtures("home")
def test_a_template_is_chosen_by_its_name(tmp_path: Path, everything: Path) -> None:
    _, folder = load_with_template(str(everything), "qwen3")
    assert (folder / "chat_template.jinja").read_text() == template_library()["qwen3"]
    plain = write_tokenizer(tmp_path / "t", SHAPES["chatml"].template)
    with pytest.raises(DataError, match=r"gemma needs <bos>, .*which .* lacks"):
        load_with_template(str(plain), "gemma")
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    assert [name for name, text in template_library().items() if not lacking(tokenizer, text)] == [
        "chatml",
        "llama3",
        "llama3_1",
        "mistral",
        "phi3",
        "qwen2_5",
        "qwen3",
        "smollm2",
    ]
