"""What a person is shown of the data: text with the trained tokens marked, origins, pictures, and who is given what."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crosstrain
from conftest import Workspace
from crosstrain.cli.main import main
from crosstrain.data.splits import open_split
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils.types import IGNORE_INDEX
from fixtures_chat import SHAPES, write_tokenizer
from fixtures_vision import mixed_project, shapes, write_project


def marked(view: Any) -> str:
    """The trained tokens as text, by the sample's labels."""
    tokens = [int(t) for row in view.rows for t in row["labels"] if t != IGNORE_INDEX]
    return view.tokenizer.decode(tokens)


def test_text_and_its_origin(workspace: Workspace) -> None:
    views = crosstrain.samples(workspace.project, "train", [0, 5])
    config = crosstrain.load_config(workspace.project)
    dataset = open_split(config, "train")
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    for number, view in zip([0, 5], views, strict=True):
        index = dataset.training_index(config.run.seed, number)
        sample = dataset.get(index, np.random.default_rng(0))
        assert np.array_equal(view.data["input_ids"], sample["input_ids"])
        title = f"sample {number} of train, index {index} of {len(dataset)}, {dataset.location(index)}"
        first, rest = tokenizer.decode(sample["input_ids"][:1]), tokenizer.decode(sample["labels"])
        assert repr(view) == f"{title}\n{first}«{rest}»"
    assert crosstrain.samples(workspace.project, "val")[0].title.startswith("sample 0 of val, index 0 of ")


TEMPLATE = (
    "{% for m in messages %}({{ m.role }}) {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}(assistant) {% endif %}"
)


def test_prompts_are_shown_as_the_sampler_completes_them(tmp_path: Path) -> None:
    """With the template up to the answer's first token, and then the reference answer."""
    rows = [[{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "it is 2"}]] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows))
    write_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    options = {"path": f"{tmp_path}/a.jsonl", "tokenizer": f"{tmp_path}/tokenizer", "seq_length": 64}
    project = {
        "model": {"arch": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 64, "vocab_size": 600},
        "datasets": {"mine": {"name": "prompts", **options}},
        "run": {"output_dir": f"{tmp_path}/out", "max_iters": 1, "global_batch_size": 1},
    }
    (view,) = crosstrain.samples(project)
    assert view.text() == "(user) 1 + 1(assistant) \nanswer: it is 2</s>"
    ids, answer = (view.data[key].tolist() for key in ("input_ids", "answer"))
    assert view.text(ids=True) == f"{' '.join(map(str, ids))}\nanswer: {answer}"


def test_tokens_without_a_tokenizer_are_ids(workspace: Workspace, dataset: Path) -> None:
    prefix = workspace.path / "megatron"
    for ending in (".bin", ".idx"):
        prefix.with_suffix(ending).write_bytes((dataset / f"tokens{ending}").read_bytes())
    view = crosstrain.samples(workspace.project, options={"datasets.tiny.path": prefix})[0]
    ids, labels = view.data["input_ids"].tolist(), view.data["labels"].tolist()
    assert view.text() == f"{ids[0]} «{' '.join(map(str, labels))}»"
    same = crosstrain.samples(workspace.project)[0]
    assert same.text(ids=True) == view.text() != same.text()


@pytest.fixture
def chats(tmp_path: Path) -> dict[str, Any]:
    rng = random.Random(0)
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "hello " * n}]}
        for n in (rng.randrange(1, 9) for _ in range(20))
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": "which", "chosen": "cat", "rejected": "mat"}] * 4
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    tokenizer = write_tokenizer(tmp_path / "tokenizer", SHAPES["chatml"].template)
    run = {"output_dir": str(tmp_path / "out"), "max_iters": 1, "micro_batch_size": 2, "init_lr": 1e-3}
    data = {"name": "chat", "path": str(tmp_path / "chats.jsonl"), "tokenizer": str(tokenizer), "seq_length": 128}
    return {"model": {"arch": "gpt2", "model_type": "tiny"}, "datasets": {"chats": data}, "run": run}


def test_conversations_show_the_answer_that_is_learned(chats: dict[str, Any], tmp_path: Path) -> None:
    for view in crosstrain.samples(chats, numbers=range(20)):
        asked, answer = view.text().split("<|im_start|>assistant\n")
        assert asked.startswith("<|im_start|>user\nsay ")
        assert answer == f"«{marked(view)}»"
        assert f"{tmp_path}/chats.jsonl:" in view.title


def test_packed_conversations_are_set_apart(chats: dict[str, Any]) -> None:
    view = crosstrain.samples(chats, options={"datasets.chats.packing": True})[0]
    parts = view.text().split("\n--- next document\n")
    assert len(parts) == view.title.count("chats.jsonl:") > 1
    assert all(part.startswith("<|im_start|>user\n") and part.count("«") == 1 for part in parts)


def test_pairs_are_shown_answer_by_answer(chats: dict[str, Any], tmp_path: Path) -> None:
    chats["datasets"]["chats"] |= {"name": "preference", "path": str(tmp_path / "pairs.jsonl")}
    shown = crosstrain.samples(chats)[0].text()
    assert "--- row 0\n<|im_start|>user\nwhich<|im_end|>\n<|im_start|>assistant\n«cat<|im_end|>»" in shown
    assert "--- row 1\n<|im_start|>user\nwhich<|im_end|>\n<|im_start|>assistant\n«mat<|im_end|>»" in shown
    assert shown.endswith("preferred: [1, -1]")


def test_a_mixture_names_the_part(workspace: Workspace) -> None:
    text = workspace.config["datasets"]["tiny"]
    workspace.config["datasets"] = {
        "all": {"name": "mixture", "parts": [{"dataset": text, "ratio": 1}, {"dataset": text, "ratio": 3}]}
    }
    titles = [view.title for view in crosstrain.samples(workspace.config, numbers=range(40))]
    assert [sum(f", part {k} (text), document" in title for title in titles) for k in (0, 1)] == [10, 30]


def test_samples_with_images_have_their_pixels(
    home: Path, words: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    project = write_project(home / "project.yaml", shapes(home))
    arguments = ["samples", "--cfg-path", str(project), "--number", "0", "1", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "train-000000.tar: " in out
    assert out.count("<image>") == out.count("pixel_values: float32 [1, 3, 16, 16]") == 3
    mixed = mixed_project(home, words)
    views = crosstrain.samples(mixed, numbers=range(12))
    found = sorted(len(view.data.get("pixel_values", ())) for view in views)
    assert found == [0, 0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 3]
    one = crosstrain.load_config(mixed).plain
    one["datasets"] = {"both": {"name": "mixture", "parts": [{"dataset": one["datasets"]["images"]}] * 2}}
    both = open_split(crosstrain.load_config(one), "train")
    kinds = [{e.kind for n in half for e in both.examples(n)} for half in (range(12), range(12, len(both)))]  # type: ignore[attr-defined]
    labels = [{kind.partition(", ")[0] for kind in part} for part in kinds]
    assert labels == [{"part 0 (instructions)"}, {"part 1 (instructions)"}]


def test_data_that_are_no_tokens_are_shown_as_arrays(workspace: Workspace) -> None:
    (workspace.path / "plugins").mkdir()
    (workspace.path / "plugins" / "points.py").write_text(
        "import numpy as np\nfrom crosstrain import Dataset, registry\n@registry.register_dataset('points')\n"
        "class Points(Dataset):\n    def __len__(self):\n        return 9\n"
        "    def get(self, index, rng):\n        return {'x': np.full(2, index), 'y': np.zeros((5, 5), np.float32)}\n"
    )
    workspace.config["datasets"] = {"points": {"name": "points"}}
    workspace.config["run"]["plugins"] = [str(workspace.path / "plugins")]
    view = crosstrain.samples(workspace.config, "val", [7])[0]
    assert set(view.text().split("\n")) == {"x: [7, 7]", "y: float32 [5, 5]"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--split", "tain"], "split: expected one of train, val, test, got 'tain'"),
        (["--split", "val", "--number", "0", "100000"], "samples of the val split are numbered from 0, got 100000"),
        (["--number", "-1"], "samples of the train split are numbered from 0, got -1"),
    ],
)
def test_mistakes(workspace: Workspace, capsys: pytest.CaptureFixture[str], flags: list[str], expected: str) -> None:
    assert main(["samples", "--cfg-path", str(workspace.project), *flags]) == 1
    assert expected in capsys.readouterr().err
