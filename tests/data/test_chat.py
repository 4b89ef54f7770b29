"""The `chat` dataset: every published layout, what is dropped and why, targets, packing, and the same under runners."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from crosstrain_plugins.builtin.datasets.packing import pack
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import Workspace
from crosstrain.config.registry import registry
from crosstrain.config.schema import Component
from crosstrain.utils.errors import DataError
from crosstrain.utils.types import IGNORE_INDEX
from fixtures_chat import SHAPES, conversation, write_tokenizer
from fixtures_ranks import mostly_slow
from fixtures_training import TOLERANCE, assert_equal_training, follow

Chat = registry.get("dataset", "chat")
RNG = np.random.default_rng(0)
ASKED, ANSWERED = "What is one and one?", "Two, I think."
TURNS = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
LAYOUTS: dict[str, dict[str, Any]] = {
    "messages": {"messages": TURNS},
    "parts": {"messages": [{"role": t["role"], "content": [{"type": "text", "text": t["content"]}]} for t in TURNS]},
    "prompt": {"prompt": ASKED, "completion": ANSWERED},
    "question": {"question": ASKED, "answer": ANSWERED},
    "response": {"prompt": ASKED, "response": ANSWERED},
    "prompt of turns": {"prompt": TURNS[:1], "completion": TURNS[1:]},
    "sharegpt": {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}]},
    "alpaca": {"instruction": ASKED, "input": "", "output": ANSWERED},
}


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chatml") / "t", SHAPES["chatml"].template)


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat(path: Path | list[Path], tokenizer: Path, split: str = "train", **options: Any) -> Any:
    where = [str(p) for p in path] if isinstance(path, list) else str(path)
    return Chat(Chat.Options(where, str(tokenizer), **({"seq_length": 256} | options)), split)


def said(data: Any, sample: dict[str, np.ndarray]) -> str:
    from crosstrain.data.tokenizer import load_tokenizer

    return load_tokenizer(data.tokenizer_path).decode([int(t) for t in sample["labels"] if t != IGNORE_INDEX])


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder", "saved"])
def test_every_layout_gives_the_same_sample(tmp_path: Path, chatml: Path, layout: str, kind: str) -> None:
    row = LAYOUTS[layout]
    path = tmp_path / f"data.{kind}"
    if kind == "json":
        path.write_text(json.dumps([row]))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    elif kind == "saved":
        datasets.Dataset.from_list([row]).save_to_disk(str(path))
    elif kind == "folder":
        path.mkdir()
        lines(path / "part.jsonl", [row])
    else:
        lines(path, [row])
    expected = chat(lines(tmp_path / "expected.jsonl", [LAYOUTS["messages"]]), chatml).get(0, RNG)
    data = chat(path, chatml)
    sample = data.get(0, RNG)
    assert sample.keys() == expected.keys()
    assert all((sample[key] == expected[key]).all() for key in expected)
    assert said(data, sample) == f"{ANSWERED}<|im_end|>"


@pytest.mark.usefixtures("home")
def test_unusable_conversations_are_dropped_and_named(tmp_path: Path, chatml: Path) -> None:
    reasons = {
        "{": "it is not JSON",
        "[1]": "it is not a JSON object",
        '{"text": "a"}': "it has text; expected messages",
        '{"messages": []}': "messages is not a list of turns",
        '{"messages": [1]}': "a turn is int",
        '{"messages": [{"role": "user", "content": "a"}]}': "it has no assistant turn, so there is nothing to train on",
        '{"messages": [{"role": "nobody", "content": "a"}]}': "a turn has the role 'nobody'",
        '{"messages": [{"role": "user"}]}': "a turn of the user has no text",
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "a turn has a part of type image, not text",
        '{"prompt": "a<|im_end|>", "completion": "b"}': "contains the special token",
        json.dumps({"messages": [TURNS[0], TURNS[1] | {"reasoning_content": "x<|im_end|>"}]}): "turn 2 contains the",
        json.dumps({"messages": TURNS, "tools": [{"name": "<|im_start|>"}]}): "the tools contains the special token",
        '{"instruction": 5, "output": "a"}': "it is malformed",
        '{"instruction": "a", "history": [5], "output": "a"}': "a turn is int",
        json.dumps({"messages": TURNS, "tools": "[" * 10**5}): "tools is not JSON",
        '{"messages": [{"role": "assistant", "content": 5, "tool_calls": [{}]}]}': "of the assistant has no text",
        json.dumps({"prompt": "a", "completion": "b " * 300}): "seq_length is 256",
    }
    path = lines(tmp_path / "d.jsonl", [LAYOUTS["messages"], *reasons, LAYOUTS["prompt"]])
    with pytest.raises(DataError, match=r"17 of 19 rows are dropped, .* more than max_dropped=0\.1"):
        chat(path, chatml)
    data = chat(path, chatml, max_dropped=0.9)
    assert len(data) == 2
    assert data.location(1) == f"{path}:{len(reasons) + 2}"
    report = json.loads((data.folder / "report.json").read_text())
    assert (report["conversations"], report["dropped"]) == (2, len(reasons))
    for number, (named, reason) in enumerate(zip(report["named"], reasons.values(), strict=True), 2):
        assert named.startswith(f"{path}:{number}: ")
        assert reason in named
    assert data.notice.startswith(f"{len(reasons)} of {len(reasons) + 2} rows are dropped, 2 such as {path}:")
    assert data.notice.endswith(f"; see {data.folder / 'report.json'}")
    with pytest.raises(DataError, match=r"d\.jsonl:2: it is not JSON.* more than max_dropped=0;"):
        chat(path, chatml, max_dropped=0)


@pytest.mark.usefixtures("home")
def test_a_table_s_nulls_and_splits(tmp_path: Path, chatml: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    rows = [{"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}]
    tables = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name in ("train", "test")})
    tables.save_to_disk(str(tmp_path / "tables"))
    with pytest.raises(DataError, match="tables holds several splits: give the files or the folder of one split"):
        chat(tmp_path / "tables", chatml)
    tools = write_tokenizer(tmp_path / "tools", SHAPES["tool calls as JSON"].template)
    data = chat(tmp_path / "tables" / "train", tools)
    assert '"arguments": {"a": 1}' in said(data, data.get(0, RNG))


@pytest.mark.usefixtures("home")
def test_all_tokens_are_learned_and_the_end_of_a_turn_ends_an_answer(tmp_path: Path, chatml: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [LAYOUTS["messages"]])
    ends = [set(chat(path, chatml, train_on=which).end_tokens) for which in ("assistant", "all")]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 2  # of a turn and of a text


@pytest.mark.usefixtures("home")
def test_a_mixture_of_what_is_packed_and_what_is_not_is_refused(tmp_path: Path, chatml: Path) -> None:
    mixture = registry.get("dataset", "mixture")
    part = sys.modules[mixture.__module__].MixturePart
    path = str(lines(tmp_path / "d.jsonl", [LAYOUTS["messages"]]))
    parts = [
        part(Component("chat", Chat.Options(path, str(chatml), seq_length=64, packing=packing)))
        for packing in (True, False)
    ]
    with pytest.raises(
        DataError, match="either all parts of a mixture must separate the documents of a sample, or none"
    ):
        mixture(mixture.Options(parts), "train")
    mixed = mixture(mixture.Options([parts[0], parts[0]]), "train")
    assert mixed.documents
    assert len(mixed.end_tokens) == 2


@pytest.mark.usefixtures("home")
def test_a_template_of_the_project_replaces_the_tokenizers_and_is_kept(tmp_path: Path, chatml: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [LAYOUTS["messages"]])
    template = SHAPES["role prefixes with a prompt"].template
    data = chat(path, chatml, chat_template=template)
    assert said(data, data.get(0, RNG)) == f" {ANSWERED}</s>"
    assert (data.tokenizer_path / "chat_template.jinja").read_text() == template
    with pytest.raises(DataError, match="no chat template"):
        chat(path, write_tokenizer(tmp_path / "none", None))


@pytest.mark.usefixtures("home")
def test_changed_files_are_rendered_again(tmp_path: Path, chatml: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [LAYOUTS["messages"]])
    assert len(chat(path, chatml)) == 1
    lines(path, [LAYOUTS["messages"]] * 3)
    assert len(chat(path, chatml)) == 3
    assert len(chat([path, path], chatml)) == 6
    with pytest.raises(DataError, match=r"the val split contains none"):
        chat(path, chatml, "val")


@given(st.lists(st.integers(1, 40), max_size=200), st.integers(40, 100))
def test_packs_hold_every_document_once_and_are_well_filled(lengths: list[int], capacity: int) -> None:
    packs = pack(lengths, capacity)
    assert sorted(number for one in packs for number in one) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in one) for one in packs]
    assert all(total <= capacity for total in filled)
    # No two packs would fit into one: best fit opens a new one only where no open one has room.
    assert all(a + b > capacity for a, b in zip(sorted(filled), sorted(filled)[1:], strict=False))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_a_pack_is_its_conversations_one_after_another(
    tmp_path_factory: pytest.TempPathFactory, chatml: Path, seed: int
) -> None:
    rng, home = random.Random(seed), tmp_path_factory.mktemp("packs")
    shape = SHAPES["chatml"]
    path = lines(home / "d.jsonl", [{"messages": conversation(rng, shape)} for _ in range(rng.randint(1, 20))])
    alone, packed = chat(path, chatml, seq_length=512), chat(path, chatml, seq_length=512, packing=True)
    for index, numbers in enumerate(packed.packs):
        sample = packed.get(index, RNG)
        parts = [alone.get(number, RNG) for number in numbers]
        for key in ("input_ids", "labels"):
            assert sample[key].tolist() == [value for part in parts for value in part[key].tolist()]
        assert sample["position_ids"].tolist() == [n for part in parts for n in range(len(part["labels"]))]
    batch = packed.collate([packed.get(index, RNG) for index in range(len(packed))])
    assert batch["input_ids"].shape == batch["position_ids"].shape
    assert (batch["position_ids"][:, 0] == 0).all()


def project(workspace: Workspace, tokenizer: Path, **options: Any) -> Workspace:
    rng, shape = random.Random(0), SHAPES["chatml"]
    path = lines(workspace.path / "chat.jsonl", [{"messages": conversation(rng, shape)} for _ in range(60)])
    workspace.config["datasets"] = {
        "chat": {"name": "chat", "path": str(path), "tokenizer": str(tokenizer), "seq_length": 256} | options
    }
    workspace.config["model"] |= {"vocab_size": 512, "n_positions": 256, "dropout": 0.0}
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return workspace


@pytest.mark.parametrize(
    "runner", mostly_slow(["fsdp@2", "zero2@2", "zero3@2", "megatron_tp2_sp@2", "megatron_tp2_pp2@4"], [])
)
def test_packed_conversations_train_alike_under_every_runner(workspace: Workspace, chatml: Path, runner: str) -> None:
    project(workspace, chatml, packing=True)
    options = ("run.max_iters=6", "run.micro_batch_size=1", "run.global_batch_size=4")
    assert_equal_training(follow(workspace, "ddp@1", *options), follow(workspace, runner, *options), TOLERANCE)


@pytest.mark.slow
def test_a_run_stopped_within_an_epoch_of_packs_resumes_exactly_on_other_ranks(
    workspace: Workspace, chatml: Path
) -> None:
    project(workspace, chatml, packing=True)
    options = ("run.global_batch_size=4", "run.micro_batch_size=1", "run.save_interval=3", "run.lr_decay_iters=6")
    whole = workspace.train("whole", *options, "run.max_iters=6")
    workspace.train("parts", *options, "run.max_iters=3", nproc=2)
    parts = workspace.train("parts", *options, "run.max_iters=6")
    assert parts.column("samples") == whole.column("samples")
    assert parts.column("loss") == pytest.approx(whole.column("loss"), rel=TOLERANCE)


@pytest.mark.usefixtures("home")
def test_a_split_has_files_of_its_own(tmp_path: Path, chatml: Path) -> None:
    for name, rows in {"train": 5, "val": 3}.items():
        lines = ({"messages": [*TURNS[:1], {"role": "assistant", "content": f"{name} {i}"}]} for i in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    own = {"val": str(tmp_path / "val.jsonl")}
    train, val = (chat(tmp_path / "train.jsonl", chatml, split, **own) for split in ("train", "val"))
    assert (len(train), len(val)) == (5, 3)
    assert "val.jsonl" in val.location(0)
    with pytest.raises(DataError, match="set test to files of its own"):
        chat(tmp_path / "train.jsonl", chatml, "test", **own)


def test_a_dry_run_looks_for_the_files(tmp_path: Path) -> None:
    path = lines(tmp_path / "train.jsonl", [LAYOUTS["messages"]])
    options = Chat.Options(str(path), "not/loaded", 256, val=str(tmp_path / "vla.jsonl"))
    with pytest.raises(DataError, match=r"the input .*vla\.jsonl does not exist"):
        Chat.is_prepared(options)
    options.val = [str(path), "docstrings", "s3://bucket/not-looked-for"]
    assert not Chat.is_prepared(options)


@pytest.mark.usefixtures("home")
def test_a_chat_template_may_be_a_file(tmp_path: Path, chatml: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [LAYOUTS["messages"]])
    template = SHAPES["chatml"].template
    (tmp_path / "own.jinja").write_text("hello " + template)
    text, file = (chat(path, chatml, chat_template=given) for given in (template, str(tmp_path / "own.jinja")))
    assert len(file.tokens(0)[0]) > len(text.tokens(0)[0])
    with pytest.raises(DataError, match=r"chat_template: chatlm is neither Jinja, a file nor one of chatml, "):
        chat(path, chatml, chat_template="chatlm")
