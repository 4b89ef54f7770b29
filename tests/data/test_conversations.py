# ruff: noqa: E501 - rows
"""Every layout of conversations is brought into one normal form, whatever stands beside it and in whatever file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from crosstrain_plugins.builtin.commands.prepare.chat_template import ChatError
from crosstrain_plugins.builtin.commands.prepare.conversation_files import rows
from crosstrain_plugins.builtin.commands.prepare.conversations import conversations
from crosstrain_plugins.builtin.datasets.row_audit import RowAudit
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from crosstrain.config.registry import registry
from crosstrain.utils.errors import DataError
from crosstrain.utils.types import IGNORE_INDEX
from fixtures_chat import SHAPES, write_tokenizer

Row = dict[str, Any]
Q, A, SYSTEM, THOUGHT = "What is\n\none and one?", "Two.", "Be brief.", "One and one make two."
ASKED: Row = {"role": "user", "content": Q}
ANSWERED: Row = {"role": "assistant", "content": A}
EARLIER: list[Row] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
ARGUMENTS = {"a": 1, "where": {"city": "Rome"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def sharegpt(turns: list[Row]) -> list[Row]:
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    return [{"from": names[turn["role"]], "value": turn["content"]} | _more(turn) for turn in turns]


def _more(turn: Row) -> Row:
    return {key: value for key, value in turn.items() if key not in ("role", "content")}


def parts(turn: Row) -> Row:
    return turn | {"content": [{"type": "text", "text": turn["content"]}]}


# 25 layouts of one question and its answer, which may be a turn with more keys. Those in `TEXTS` have no place for these.
LAYOUTS: dict[str, Callable[[Row], Row]] = {
    "messages": lambda answer: {"messages": [ASKED, answer]},
    "messages of parts": lambda answer: {"messages": [parts(ASKED), parts(answer)]},
    "messages as JSON": lambda answer: {"messages": json.dumps([ASKED, answer])},
    "messages in capitals": lambda answer: {"messages": [ASKED | {"role": "User"}, answer | {"role": "Assistant"}]},
    "sharegpt": lambda answer: {"conversations": sharegpt([ASKED, answer])},
    "sharegpt with roles": lambda answer: {"conversations": [ASKED, answer]},
    "conversation": lambda answer: {"conversation": [ASKED, answer]},
    "prompt and completion of turns": lambda answer: {"prompt": [ASKED], "completion": [answer]},
    "prompt and completion of a turn": lambda answer: {"prompt": ASKED, "completion": answer},
    "prompt and completion": lambda _: {"prompt": Q, "completion": A},
    "question and answer": lambda _: {"question": Q, "answer": A},
    "prompt and response": lambda _: {"prompt": Q, "response": A},
    "query and response": lambda _: {"query": Q, "response": A},
    "instruction and output": lambda _: {"instruction": Q, "output": A},
    "instruction and response": lambda _: {"instruction": Q, "input": "", "response": A},
    "instruction, input and output": lambda _: {"instruction": "What is", "input": "one and one?", "output": A},
}
TEXTS = {name for name, layout in LAYOUTS.items() if layout(ANSWERED) == layout(ANSWERED | {"weight": 0})}
BAD: Row = {"role": "assistant", "content": "Three."}
RANKED: dict[str, Callable[[Row], Row]] = {
    "pair": lambda answer: {"prompt": Q, "chosen": answer["content"], "rejected": BAD["content"]},
    "pair of turns": lambda answer: {"prompt": [ASKED], "chosen": [answer], "rejected": [BAD]},
    "pair of whole conversations": lambda answer: {"chosen": [ASKED, answer], "rejected": [ASKED, BAD]},
    "pair after a conversation": lambda answer: {"conversations": sharegpt([ASKED]), "chosen": answer, "rejected": BAD},
    "question with a pair": lambda answer: {"question": Q, "chosen": answer["content"], "rejected": BAD["content"]},
    "alpaca pair": lambda answer: {"instruction": Q, "input": "", "chosen": answer["content"], "rejected": BAD["content"]},
    "alpaca list": lambda answer: {"instruction": Q, "output": [answer["content"], BAD["content"]]},
    "openai's pair": lambda answer: {
        "input": {"messages": [ASKED]}, "preferred_output": [answer], "non_preferred_output": [BAD]
    },
    "label": lambda answer: {"prompt": Q, "completion": answer["content"], "label": True},
}  # fmt: skip


def normal(row: Row, ranked: bool = False) -> list[tuple[list[Row], list[Any], bool]]:
    found, unread = conversations(row, ranked)
    assert unread == set()
    return [([turn.model_dump(exclude_unset=True) for turn in one.messages], one.tools, one.is_good) for one in found]


def test_there_are_25_layouts() -> None:
    assert len(LAYOUTS) + len(RANKED) == 25


ROWS = {**LAYOUTS, **RANKED}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("system", [{}, {"system": SYSTEM}, {"system_prompt": SYSTEM}, {"system_message": SYSTEM}])
@pytest.mark.parametrize(
    "tools", [{}, {"tools": [TOOL]}, {"functions": [TOOL["function"]]}, {"tools": json.dumps([TOOL])}]
)
@pytest.mark.parametrize("nulls", [False, True])
def test_a_layout_with_columns_beside_it(name: str, system: Row, tools: Row, nulls: bool) -> None:
    row = ROWS[name](ANSWERED) | system | tools
    if nulls:
        row |= dict.fromkeys(("history", "images", "unknown", *({"tools", "system"} - row.keys())))
    found = normal(row, name in RANKED)
    before = ([{"role": "system", "content": SYSTEM}] if system else []) + [ASKED]
    wanted = [([*before, ANSWERED], [TOOL] if tools else [], True)]
    if name in RANKED and name != "label":
        wanted.append(([*before, BAD], wanted[0][1], False))
    assert found == wanted


MORE: dict[str, tuple[Row, Row]] = {  # keys of a turn, and what they are in the normal form
    **{f"{key}: {no}": ({key: no}, {"weight": 0}) for key, no in (
        ("weight", 0), ("weight", 0.0), ("loss", False), ("train", False), ("trainable", False), ("loss_mask", 0), ("mask", True),
        ("is_trainable", False), ("calculate_loss", 0), ("no_loss", True))},
    **{f"{key}: {yes}": ({key: yes}, {"weight": 1}) for key, yes in (("weight", 1), ("train", True), ("mask", False))},
    **{key: ({key: THOUGHT}, {"reasoning_content": THOUGHT}) for key in ("reasoning_content", "reasoning", "thinking", "thought")},
    "calls": ({"tool_calls": [CALL]}, {"tool_calls": [CALL]}),
    "calls with ids": ({"tool_calls": [CALL | {"id": "x"}]}, {"tool_calls": [CALL | {"id": "x"}]}),
    "calls as JSON": ({"tool_calls": json.dumps([CALL])}, {"tool_calls": [CALL]}),
    "arguments as JSON": (
        {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}]},
        {"tool_calls": [CALL]},
    ),
    "calls of functions only": ({"tool_calls": [CALL["function"]]}, {"tool_calls": [CALL]}),
    "parameters": ({"tool_calls": [{"name": "add", "parameters": ARGUMENTS}]}, {"tool_calls": [CALL]}),
    "no arguments": ({"tool_calls": [{"name": "now", "arguments": ""}]},
                     {"tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}]}),
    "a function_call": ({"function_call": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}, {"tool_calls": [CALL]}),
    "nulls": ({"tool_calls": None, "reasoning_content": None, "weight": None, "name": None}, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name in ROWS if name not in TEXTS and "turn" in name + "turns" * (name in LAYOUTS)]
)
@pytest.mark.parametrize("more", MORE)
def test_a_layout_of_turns_keeps_what_they_hold(name: str, more: str) -> None:
    given_keys, wanted = MORE[more]
    found = normal(ROWS[name](ANSWERED | given_keys), name in RANKED)
    assert found[0] == ([ASKED, ANSWERED | wanted], [], True)


@pytest.mark.parametrize("value", [
    [CALL["function"], CALL["function"] | {"name": "sub"}],
    json.dumps([CALL["function"], CALL["function"] | {"name": "sub"}]),
    json.dumps([CALL, {"function": {"name": "sub", "arguments": json.dumps(ARGUMENTS)}}]),
])  # fmt: skip
@pytest.mark.parametrize("role", ["function_call", "tool_call"])
def test_a_turn_that_is_a_list_of_calls_has_one_call_per_entry(value: Any, role: str) -> None:
    turns = [{"from": "human", "value": Q}, {"from": role, "value": value}, {"from": "observation", "value": "3"}]
    ((messages, _, _),) = normal({"conversations": turns})
    second = {"type": "function", "function": {"name": "sub", "arguments": ARGUMENTS}}
    assert messages[1] == {"role": "assistant", "content": None, "tool_calls": [CALL, second]}
    assert messages[2] == {"role": "tool", "content": "3"}


def test_results_of_tools_keep_names_and_ids() -> None:
    result = {"role": "tool", "content": "3", "tool_call_id": "x", "name": "add"}
    ((messages, _, _),) = normal({"messages": [ASKED, ANSWERED | {"tool_calls": [CALL]}, result]})
    assert messages[2] == result
    legacy = {"role": "function", "name": "add", "content": "3"}
    ((messages, _, _),) = normal({"messages": [ASKED, ANSWERED | {"function_call": CALL["function"]}, legacy]})
    assert messages[2] == {"role": "tool", "name": "add", "content": "3"}


def test_tools_in_the_input_of_openais_pairs() -> None:
    row = RANKED["openai's pair"](ANSWERED)
    row["input"] |= {"functions": [TOOL["function"]], "parallel_tool_calls": True}
    found, unread = conversations(row, True)
    assert ([one.tools for one in found], unread) == ([[TOOL], [TOOL]], {"parallel_tool_calls"})


@pytest.mark.slow
def test_every_column_of_the_docstrings_is_read() -> None:
    for ranked in (False, True):
        row, _ = next(rows(["docstrings"], ranked))
        assert normal(row, ranked)[0][0][-1]["role"] == "assistant"


def test_earlier_exchanges_of_every_question() -> None:
    for history in ([["hello", "hi"]], EARLIER):
        for name in ("instruction and output", "query and response", "prompt and completion"):
            assert normal(LAYOUTS[name](ANSWERED) | {"history": history})[0][0] == [*EARLIER, ASKED, ANSWERED]
        assert normal(RANKED["pair"](ANSWERED) | {"history": history}, True)[1][0] == [*EARLIER, ASKED, BAD]


@pytest.mark.parametrize("given_tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]], TOOL])
def test_tools_of_a_system_turn(given_tools: Any) -> None:
    turns = [{"role": "system", "content": SYSTEM, "tools": given_tools}, ASKED, ANSWERED]
    assert normal({"messages": turns}) == [([{"role": "system", "content": SYSTEM}, ASKED, ANSWERED], [TOOL], True)]
    assert normal({"messages": turns, "tools": [TOOL]})[0][1] == [TOOL]
    with pytest.raises(ChatError, match="it has two different lists of tools"):
        conversations({"messages": turns, "tools": [CALL]})


def test_a_system_column_agrees_with_the_system_turn_or_the_row_is_refused() -> None:
    turns = [{"role": "system", "content": SYSTEM}, ASKED, ANSWERED]
    assert normal({"messages": turns, "system": SYSTEM})[0][0] == turns
    for name in ("messages", "conversations"):
        with pytest.raises(ChatError, match="its system column differs from its system turn"):
            conversations({name: turns, "system": "Be long."})
    pair = {"prompt": turns[:2], "chosen": [ASKED, ANSWERED], "rejected": [ASKED, BAD]}
    assert normal(pair, True)[0][0] == turns


LABELS = [(True, True), (1, True), (1.0, True), ("true", True), ("True", True), ("1", True),
          (False, False), (0, False), ("false", False), ("0", False)]  # fmt: skip


@pytest.mark.parametrize("key", ["label", "kto_tag"])
@pytest.mark.parametrize(("label", "good"), LABELS)
def test_labels(key: str, label: Any, good: bool) -> None:
    for name in ("messages", "prompt and completion", "sharegpt"):
        assert normal(LAYOUTS[name](ANSWERED) | {key: label}, True) == [([ASKED, ANSWERED], [], good)]


REFUSED: dict[str, tuple[Row, str]] = {
    "half a weight": ({"messages": [ASKED, ANSWERED | {"weight": 0.5}]}, r"a turn has \{'weight': 0.5\}"),
    "a weight in words": ({"messages": [ASKED, ANSWERED | {"weight": "0"}]}, r"a turn has \{'weight': '0'\}"),
    "contradiction": ({"messages": [ASKED, ANSWERED | {"weight": 1, "train": False}]}, "which contradict each other"),
    "a call without a name": ({"messages": [ASKED, ANSWERED | {"tool_calls": [{"arguments": {}}]}]}, "a call of None has no"),
    "arguments that are a list": (
        {"messages": [ASKED, ANSWERED | {"tool_calls": [{"name": "f", "arguments": "[1]"}]}]}, "its arguments are not a JSON object",
    ),
    "arguments that are no JSON": (
        {"messages": [ASKED, ANSWERED | {"tool_calls": [{"name": "f", "arguments": "print(1)"}]}]}, "arguments is not JSON",
    ),
    "a function_call of words": ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "function_call is not JSON"),
    "tools that are no JSON": ({"messages": [ASKED, ANSWERED], "tools": "add"}, "tools is not JSON"),
    "an image": ({"messages": [ASKED, ANSWERED], "image": "a.png"}, "it has image, but this dataset reads only text"),
    "videos": ({"messages": [ASKED, ANSWERED], "videos": ["a.mp4"]}, "it has videos"),
    "an audio in a turn": ({"messages": [ASKED | {"audio": "a.wav"}, ANSWERED]}, "it has audio"),
    "an image part": ({"messages": [ASKED | {"content": [{"type": "image_url", "image_url": {}}]}, ANSWERED]}, "not text"),
    "a thought that is no text": ({"messages": [ASKED, ANSWERED | {"reasoning": 5}]}, "reasoning_content: Input should be"),
    "a part whose text is an object": (
        {"messages": [ASKED | {"content": [{"type": "text", "text": {"value": Q}}]}, ANSWERED]}, "whose text is not text",
    ),
    "a part whose text is a list": ({"messages": [ASKED, ANSWERED | {"content": [{"type": "text", "text": [A]}]}]}, "not text"),
    "JSON text with a repeated key": (
        {"messages": [ASKED, ANSWERED | {"tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}]}, "arguments is not JSON",
    ),
    "half of an exchange": ({"instruction": Q, "output": A, "history": [["hello"]]}, "a turn is list"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    row, reason = REFUSED[name]
    with pytest.raises(ChatError, match=reason):
        conversations(row)


OTHER = {"role": "user", "content": "What is two?"}
FALSE = {"role": "assistant", "content": "Three."}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": [ASKED, ANSWERED], "rejected": [OTHER, FALSE]}, "the prompts of chosen and rejected differ"),
        (
            {"chosen": [*EARLIER, ASKED, ANSWERED], "rejected": [ASKED, FALSE]},
            "the prompts of chosen and rejected differ",
        ),
        ({"messages": [ASKED, ANSWERED], "chosen": [ANSWERED], "rejected": [FALSE]}, "its prompt ends with an answer"),
    ],
)
def test_two_answers_have_one_prompt_that_ends_before_them(row: Row, reason: str) -> None:
    with pytest.raises(ChatError, match=reason):
        conversations(row, True)


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "f"}, "arguments": {"a": 1}},
        {"name": "f", "arguments": {}, "parameters": {"a": 1}},
    ],
)
def test_arguments_that_no_call_gets_are_reported(call: Row) -> None:
    _, unread = conversations({"messages": [ASKED, ANSWERED | {"tool_calls": [call]}]})
    assert unread & {"messages.tool_calls.arguments", "messages.tool_calls.parameters"}


@pytest.mark.parametrize(
    "names",
    [
        ("train/a.jsonl", "test/a.jsonl"),
        ("my_train.jsonl", "my_test.jsonl"),
        ("train.jsonl", "eval.jsonl"),
        ("Train/a.jl", "Test/a.jl"),
        ("json-train.jsonl", "json-validation.jsonl"),
        ("training/a.jsonl", "testing/a.jsonl"),
    ],
)
def test_a_folder_with_several_splits_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match="holds several splits"):
        list(rows([str(tmp_path)]))
    (tmp_path / names[1]).rename(tmp_path / "trace_latest_contest.jsonl")
    assert len(list(rows([str(tmp_path)]))) == 2


@pytest.mark.parametrize("label", ["maybe", 2, 0.5, [], "yes"])
def test_labels_that_are_neither(label: Any) -> None:
    with pytest.raises(ChatError, match="a label of true, false, 1 or 0"):
        conversations({"prompt": Q, "completion": A, "label": label}, True)


# ---- nothing is left out in silence

KNOWN = {
    *("messages", "conversations", "conversation", "prompt", "completion", "question", "answer", "response", "query"),
    *("instruction", "input", "output", "history", "system", "system_prompt", "system_message", "tools", "functions"),
    *("image", "images", "video", "videos", "audio", "audios", "role", "from", "content", "value", "tool_calls"),
    *("function_call", "reasoning_content", "reasoning", "thinking", "thought", "weight", "loss", "train", "trainable"),
    *("training", "loss_mask", "loss_weight", "mask", "masked", "type", "text", "id", "function", "name", "arguments"),
    *("parameters", "label", "kto_tag", "chosen", "rejected", "preferred_output", "non_preferred_output"),
}
KEYS = st.text(min_size=1, max_size=12).filter(lambda key: key not in KNOWN)
VALUES = st.one_of(
    st.integers(), st.text(), st.booleans(), st.lists(st.integers()), st.dictionaries(st.text(), st.text())
)


@settings(deadline=None, max_examples=150)
@given(key=KEYS, value=VALUES, name=st.sampled_from(sorted(ROWS)))
@example(key="source", value="web", name="messages")
@example(key="id", value=1, name="pair")
@example(key="chat_template_kwargs", value={"enable_thinking": "false"}, name="label")
def test_a_column_of_no_layout_is_always_reported(key: str, value: Any, name: str) -> None:
    _, unread = conversations(ROWS[name](ANSWERED) | {key: value}, name in RANKED)
    assert unread == {key}


@settings(deadline=None, max_examples=150)
@given(key=KEYS, value=VALUES, place=st.sampled_from(["turn", "part", "call", "function"]))
@example(key="name", value="Ann", place="turn")
@example(key="cache_control", value={}, place="part")
@example(key="index", value=0, place="call")
def test_a_key_of_a_turn_a_part_or_a_call_is_always_reported(key: str, value: Any, place: str) -> None:
    asked, call = parts(ASKED), copy.deepcopy(CALL)
    whole: dict[str, Row] = {"turn": asked, "part": asked["content"][0], "call": call, "function": call["function"]}
    whole[place][key] = value
    _, unread = conversations({"messages": [asked, ANSWERED | {"tool_calls": [call]}]})
    path = {"turn": "messages.", "part": "messages.content."}.get(place, "messages.tool_calls.")
    assert unread == {path + key}


@pytest.mark.parametrize("key", ["messages", "tools", "function", "arguments", "tool_calls"])
def test_texts_below_other_keys_are_no_json(key: str) -> None:
    call = {"tool_calls": [{"name": "f", "arguments": {key: "a text"}}]}
    found, unread = conversations({"messages": [ASKED, ANSWERED | call], "meta": {key: "a text"}})
    assert found[0].messages[1].tool_calls == [{"type": "function", "function": call["tool_calls"][0]}]
    assert unread == {"meta"}
    if key not in ("messages", "tools"):
        assert conversations({"messages": [ASKED, ANSWERED], key: "a text"})[1] == {key}


def test_names_that_no_terminal_shows(tmp_path: Path) -> None:
    ((row, _),) = read(write(tmp_path / "d.jsonl", [{"prompt": Q, "completion": A, "\ud800": 1, "k" * 10**6: 2}]))
    audit = RowAudit()
    audit.row("d", sorted(conversations(row)[1]))
    assert len(audit.notices()[0].encode()) < 400


def test_what_is_read_in_part_is_reported() -> None:
    assert conversations({"messages": [ASKED, ANSWERED], "prompt": Q})[1] == {"prompt"}
    assert conversations({"messages": [ASKED, ANSWERED], "system": SYSTEM, "system_prompt": "x"})[1] == {
        "system_prompt"
    }
    placeholder = [ASKED | {"content": f"<video>\n{Q}"}, ANSWERED]
    assert conversations({"messages": placeholder})[1] == {"<video>"}
    for text, name in (("<img>a.png</img>", "<img>"), ("<|image_1|> what", "<|image"), ("[IMG]", "[IMG]")):
        assert conversations({"messages": [ASKED | {"content": text}, ANSWERED]})[1] == {name}
    nulls = [ASKED, ANSWERED | {"tool_calls": [{"name": "f", "arguments": {"a": None, "b": {"c": None}, "d": [None]}}]}]
    (found,), unread = conversations({"messages": nulls})
    assert unread == {"nulls"}
    assert found.messages[1].tool_calls[0]["function"]["arguments"] == {"b": {}, "d": [None]}
    pair = {"prompt": "another", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, BAD]}
    assert conversations(pair, True)[1] == {"the prompt next to complete conversations"}


# ---- files


def read(path: Path) -> list[tuple[Any, str]]:
    return list(rows([str(path)]))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("kind", ["list", "lines", "data", "pretty"])
def test_encodings_and_forms_of_json(tmp_path: Path, encoding: str, kind: str) -> None:
    given_rows: list[Row] = [{"prompt": "naïve", "completion": "雪 \u2028 🎉"}, {"prompt": "b", "completion": "c"}]
    texts = {
        "list": json.dumps(given_rows, ensure_ascii=False), "pretty": json.dumps(given_rows, indent=2),
        "lines": "\r\n".join(json.dumps(row, ensure_ascii=False) for row in given_rows) + "\r\n",
        "data": json.dumps({"data": given_rows}, ensure_ascii=False),
    }  # fmt: skip
    (tmp_path / "d.json").write_bytes(texts[kind].encode(encoding))
    assert [row for row, _ in read(tmp_path / "d.json")] == given_rows
    if kind != "data":
        (tmp_path / "d.jsonl").write_bytes(texts[kind].encode(encoding))
        assert [row for row, _ in read(tmp_path / "d.jsonl")] == given_rows


def test_columns_beside_data_belong_to_every_row(tmp_path: Path) -> None:
    whole = {"version": 1, "system": SYSTEM, "data": [{"prompt": Q}, {"prompt": "b", "system": "own"}, 5]}
    (tmp_path / "d.json").write_text(json.dumps(whole))
    found = [row for row, _ in read(tmp_path / "d.json")]
    assert found == [
        {"version": 1, "system": SYSTEM, "prompt": Q},
        {"version": 1, "system": "own", "prompt": "b"},
        "it is not a JSON object",
    ]


def test_one_bad_line_is_one_dropped_row(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "a", "completion": "b"}).encode()
    deep = (b'{"a": ' + b"[" * depth + b"]" * depth + b"}" for depth in (300, 900, 10**5))
    bad = [*deep, b"{", b'{"prompt": "\xff"}', b"[1]", b"null", b"5", b'"it is not JSON"']
    (tmp_path / "d.jsonl").write_bytes(b"\n".join([good, *bad, good]))
    found = read(tmp_path / "d.jsonl")
    assert [isinstance(row, dict) for row, _ in found][3:] == [*[False] * (len(bad) - 2), True]
    assert found[-1][1].endswith("d.jsonl:11")
    (tmp_path / "d.json").write_text('[{"prompt": "a"},')
    with pytest.raises(DataError, match=r"d\.json: it is not JSON"):
        read(tmp_path / "d.json")


# ---- containers


@pytest.fixture(scope="module")
def tools_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tools") / "t", SHAPES["chatml"].template)


SCALARS: dict[str, st.SearchStrategy[Any]] = {  # by name, so that a name has one type in all rows, as in a table
    "a": st.integers(0, 9), "b": st.text("xyz", max_size=3), "c": st.booleans(), "d": st.sampled_from([0.25, 1.5]),
    "e": st.fixed_dictionaries({}, optional={"x": st.integers(0, 9), "y": st.text("xyz", max_size=2)}),
    "f": st.lists(st.text("xyz", max_size=2), max_size=2),
}  # fmt: skip


@st.composite
def table_rows(draw: st.DrawFn) -> list[Row]:
    made = []
    for _ in range(draw(st.integers(1, 5))):
        keys = draw(st.permutations(sorted(SCALARS)))[: draw(st.integers(1, len(SCALARS)))]
        arguments = {key: draw(st.one_of(st.none(), SCALARS[key])) for key in keys}
        answer: Row = {"role": "assistant", "content": draw(st.sampled_from(["yes", "no", ""]))}
        if draw(st.booleans()):
            answer["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        if draw(st.booleans()):
            answer["reasoning_content"] = "hm"
        if draw(st.booleans()):
            answer["weight"] = 1
        row: Row = {"messages": [ASKED, answer]}
        row |= draw(st.sampled_from([{}, {"system": SYSTEM}, {"system": None}, {"tools": [TOOL["function"]]}]))
        made.append(copy.deepcopy(row))
    return made


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(table_rows())
def test_no_rendering_differs_between_lines_parquet_and_a_dataset_on_disk(
    tmp_path_factory: pytest.TempPathFactory, tools_template: Path, given_rows: list[Row]
) -> None:
    from crosstrain_plugins.builtin.commands.prepare.chat_template import ChatTemplate, template_library

    folder = tmp_path_factory.mktemp("containers")
    lines = folder / "d.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in given_rows))
    try:
        columns = dict.fromkeys(key for row in given_rows for key in row)
        table = pyarrow.Table.from_pylist([{key: row.get(key) for key in columns} for row in given_rows])
        pyarrow.parquet.write_table(table, folder / "d.parquet")
        saved = datasets.Dataset(table)
    except (pyarrow.ArrowException, ValueError, TypeError):
        return  # such as objects that are empty in all rows, which Parquet cannot hold
    saved.save_to_disk(str(folder / "saved"))
    saved.to_json(str(folder / "again.jsonl"))
    template = ChatTemplate(tools_template)
    template.tokenizer.chat_template = template_library()["qwen3"]
    found = []
    for name in ("d.jsonl", "d.parquet", "saved", "again.jsonl"):
        for row, _ in read(folder / name):
            (one,), _ = conversations(row)
            turns = [{key: value for key, value in turn if key in turn.model_fields_set} for turn in one.messages]
            found.append(template.render(turns, one.tools or None))
    count = len(given_rows)
    assert found[:count] == found[count : 2 * count] == found[2 * count : 3 * count] == found[3 * count :]


# ---- the dataset


def said(data: Any, number: int) -> str:
    from crosstrain.data.tokenizer import load_tokenizer

    labels = data.get(number, None)["labels"]
    return load_tokenizer(data.tokenizer_path).decode([int(token) for token in labels if token != IGNORE_INDEX])


def chat(path: Path, tokenizer: Path, **options: Any) -> Any:
    kind = registry.get("dataset", "chat")
    return kind(kind.Options(str(path), str(tokenizer), **({"seq_length": 512} | options)), "train")


def write(path: Path, given_rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given_rows))
    return path


@pytest.mark.usefixtures("home")
def test_what_nothing_reads_is_named_once_unless_it_is_ignored(tmp_path: Path, tools_template: Path) -> None:
    row = {"id": 1, "source": "web", "messages": [ASKED | {"name": "Ann"}, ANSWERED]}
    path = write(tmp_path / "d.jsonl", [row, row, {"messages": [ASKED, ANSWERED]}])
    notice = chat(path, tools_template).notice
    for key in ("id", "source", "messages.name"):
        assert f"{key} (2 of 3 rows, first in {path}:1)" in notice
    assert "ignore_columns" in notice
    folder = chat(path, tools_template).folder
    ignored = chat(path, tools_template, ignore_columns=["id", "source", "messages"])
    assert (ignored.notice, ignored.folder) == ("", folder)  # nothing is rendered again


@pytest.mark.usefixtures("home")
def test_turns_of_weight_0_are_no_targets(tmp_path: Path, tools_template: Path) -> None:
    turns = [EARLIER[0], EARLIER[1] | {"train": False}, ASKED, ANSWERED]
    path = write(tmp_path / "d.jsonl", [{"messages": turns}])
    for template in (None, "chatml"):
        assert said(chat(path, tools_template, chat_template=template), 0) == f"{A}<|im_end|>"
    everything = chat(path, tools_template, train_on="all")
    assert said(everything, 0).count("hi<|im_end|>") == 0
    assert said(everything, 0).count("assistant") == 2
    last = write(tmp_path / "last.jsonl", [{"messages": [*EARLIER, ASKED, ANSWERED | {"weight": 0}]}])
    assert said(chat(last, tools_template), 0) == "hi<|im_end|>"
    with pytest.raises(
        DataError, match="it has no assistant turn with a weight above 0, so there is nothing to train on"
    ):
        chat(last, tools_template, train_on="last")
    for weight, train_on in ((1, "assistant"), (0, "all")):
        other = write(tmp_path / f"{train_on}.jsonl", [{"messages": [ASKED | {"weight": weight}, ANSWERED]}])
        with pytest.raises(
            DataError, match=rf"turns \[1\] have weight {weight}, which train_on: {train_on} allows only for the"
        ):
            chat(other, tools_template, train_on=train_on)


@pytest.mark.usefixtures("home")
def test_calls_are_written_as_json_by_templates_that_take_texts(tmp_path: Path) -> None:
    loop = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    end = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    rows_of = {"objects": ARGUMENTS, "texts": json.dumps(ARGUMENTS)}
    ways = ("c.function.arguments", "c.function.name + c.function.arguments + ';'", "c.function.arguments | tojson")
    for number, way in enumerate(ways):
        tokenizer = write_tokenizer(tmp_path / f"t{number}", loop + "{{ c.function.name }}{{ " + way + " }}" + end)
        for name, arguments in rows_of.items():
            call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
            path = write(tmp_path / f"{name}.jsonl", [{"messages": [ASKED, ANSWERED | {"tool_calls": [call]}]}])
            assert f"add{json.dumps(ARGUMENTS)}" in said(chat(path, tokenizer), 0)
            quoting = ASKED | {"content": str(ARGUMENTS)}  # as Python writes them
            path = write(tmp_path / f"{name}.jsonl", [{"messages": [quoting, ANSWERED | {"tool_calls": [call]}]}])
            if number:
                assert json.dumps(ARGUMENTS) in said(chat(path, tokenizer), 0)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
BEGUN = {  # templates whose prompt begins a thought
    "words as they are": CHATML + "{{ m.content }}<|im_end|>\n{% endfor %}" + OPENED,
    "a thought in every answer": CHATML
    + "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>"
    "\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + OPENED,
}


@pytest.mark.usefixtures("home")
def test_a_prompt_may_begin_the_thought_of_an_answer(tmp_path: Path) -> None:
    words = f"<think>\n{THOUGHT}\n</think>\n\n{A}"
    thinks = {
        "words as they are": ANSWERED | {"content": words},
        "a thought in every answer": ANSWERED | {"reasoning": THOUGHT},
    }
    for number, (name, template) in enumerate(BEGUN.items()):
        tokenizer = write_tokenizer(tmp_path / f"t{number}", template)
        path = write(tmp_path / f"{number}.jsonl", [{"messages": [ASKED, thinks[name]]}])
        assert said(chat(path, tokenizer), 0) == f"{THOUGHT}\n</think>\n\n{A}<|im_end|>"
        plain = write(tmp_path / f"plain{number}.jsonl", [{"messages": [ASKED, ANSWERED]}])
        if name == "words as they are":  # the prompt promises a thought, and there is none
            with pytest.raises(DataError, match=r"is not a prefix .* such as chat_template: chatml or .*qwen3"):
                chat(plain, tokenizer)
            assert said(chat(plain, tokenizer, chat_template="qwen3"), 0) == f"<think>\n\n</think>\n\n{A}<|im_end|>"
        else:
            assert said(chat(plain, tokenizer), 0) == f"\n</think>\n\n{A}<|im_end|>"


@pytest.mark.usefixtures("home")
def test_templates_that_leave_something_out_are_named(tmp_path: Path, tools_template: Path) -> None:
    for number, more in enumerate(({"reasoning_content": THOUGHT}, {"tool_calls": [CALL]})):
        path = write(tmp_path / f"{number}.jsonl", [{"messages": [ASKED, ANSWERED | more]}])
        with pytest.raises(
            DataError, match=r"leaves out thoughts or tool calls of turn 2; use a template .*: chatml or"
        ):
            chat(path, tools_template)
        (home,) = {chat(path, tools_template, chat_template="chatml").folder}
        assert home.is_dir()
    path = write(tmp_path / "tools.jsonl", [{"messages": [ASKED, ANSWERED], "tools": [TOOL], "system": SYSTEM}])
    assert "tools (1 of 1 rows" in chat(path, tools_template).notice
    silent = write_tokenizer(tmp_path / "silent", SHAPES["inst"].template)
    assert "messages.content of system turns (1 of 1 rows" in chat(path, silent).notice


@pytest.mark.usefixtures("home")
def test_samples_show_what_is_not_used(tmp_path: Path, tools_template: Path, caplog: pytest.LogCaptureFixture) -> None:
    from crosstrain.cli.main import main

    path = write(tmp_path / "d.jsonl", [{"messages": [ASKED, ANSWERED], "quality": 5}])
    project = {
        "model": {"arch": "gpt2", "model_type": "tiny"},
        "datasets": {"d": {"name": "chat", "path": str(path), "tokenizer": str(tools_template), "seq_length": 64}},
        "run": {"output_dir": str(tmp_path / "out"), "max_iters": 1, "micro_batch_size": 1, "init_lr": 1e-3},
    }
    (tmp_path / "p.yaml").write_text(json.dumps(project))
    assert main(["samples", "--cfg-path", str(tmp_path / "p.yaml")]) == 0
    assert f"unused keys: quality (1 of 1 rows, first in {path}:1)" in caplog.text
