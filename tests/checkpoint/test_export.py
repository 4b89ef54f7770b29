"""`crosstrain export`: any checkpoint becomes a plain Hugging Face folder, in little memory, whole or not at all."""

from __future__ import annotations

import errno
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from crosstrain_plugins.builtin.commands.export import folder as exporting
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from conftest import ENVIRONMENT, ROOT, Workspace, kill, wait_until
from crosstrain.checkpoint import folders
from crosstrain.checkpoint.boxes import Box, Piece, Shard, flat_range_pieces, whole_pieces
from crosstrain.checkpoint.checkpointer import Checkpointer
from crosstrain.cli.main import main
from crosstrain.config.load import load_config
from crosstrain.data.splits import prepare_data
from crosstrain.distributed.group import Group
from fixtures_ranks import train
from fixtures_vision import LANGUAGE, shapes, write_project

MB = 2**20


class Thread(Group):
    """A rank that is a thread of this process."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.process_group = rank, len(values), None
        self.values, self.barrier = values, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def save(root: Path, by_rank: list[list[Shard]], write_config: Callable[[Path], object], step: int = 1) -> Path:
    """A checkpoint written by as many ranks as there are lists of shards."""
    values, barrier = [None] * len(by_rank), threading.Barrier(len(by_rank))

    def write(rank: int) -> None:
        keeper = Checkpointer(root, Thread(rank, values, barrier), lambda folder, _: write_config(folder))
        keeper.save(step, by_rank[rank], {"step": step}, pointers=["best"])
        keeper.wait()

    with ThreadPoolExecutor(len(by_rank)) as ranks:
        list(ranks.map(write, range(len(by_rank))))
    return folders.step_folder(root, step)


def cut_in_two(weights: dict[str, torch.Tensor]) -> list[list[Shard]]:
    """What two ranks hold of weights and of moments whose flattened elements they share unevenly."""
    ranks: list[list[Shard]] = [[], []]
    for name, weight in weights.items():
        flat, cut, shape = weight.reshape(-1), weight.numel() * 3 // 8 + 5, tuple(weight.shape)
        for kind, data in (("param", flat), ("exp_avg", flat * 2)):
            ranks[0].append(Shard(kind, name, shape, flat_range_pieces(data[:cut], shape, 0)))
            ranks[1].append(Shard(kind, name, shape, flat_range_pieces(data[cut:], shape, cut)))
    return ranks


@pytest.fixture(scope="module")
def theirs() -> GPT2LMHeadModel:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    return GPT2LMHeadModel(GPT2Config(**sizes, architectures=["GPT2LMHeadModel"])).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, theirs: GPT2LMHeadModel, tokenizer: Path) -> Path:
    """A GPT-2 with its tokenizer, no tensor of which is whole in any file."""

    def write_assets(folder: Path) -> None:
        theirs.config.save_pretrained(folder)
        for path in tokenizer.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())

    weights = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    return save(tmp_path_factory.mktemp("checkpoints"), cut_in_two(weights), write_assets)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 tensors of 16 MB, cut like the others."""
    weights = {f"w{i:02d}": torch.full((2048, 2048), float(i)) for i in range(24)}
    ranks = [[s for s in shards if s.kind == "param"] for shards in cut_in_two(weights)]
    return save(tmp_path_factory.mktemp("large"), ranks, lambda folder: None)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a refused export prints."""
    assert main(["export", *map(str, arguments)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def assert_same_weights(folder: Path, theirs: GPT2LMHeadModel, dtype: torch.dtype = torch.float32) -> None:
    opened = GPT2LMHeadModel.from_pretrained(folder)
    assert opened.dtype == dtype
    for (name, ours), expected in zip(opened.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, expected.to(dtype)), name


def test_a_checkpoint_cut_over_two_ranks_opens_in_transformers(
    tmp_path: Path, checkpoint: Path, theirs: GPT2LMHeadModel, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not list(checkpoint.glob("model*")), "the checkpoint itself is no model folder"
    out = tmp_path / "new" / "out"
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(out)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model.safetensors ")
    assert f"GPT2LMHeadModel.from_pretrained('{out}')" in lines[-1]
    assert f"{sum(p.numel() for p in theirs.parameters()):,} parameters" in lines[-1]
    assert_same_weights(out, theirs)
    assert load_file(out / "model.safetensors").keys() == {name for name, _ in theirs.named_parameters()}
    others = {path.name for path in tokenizer.iterdir()} | {"config.json"}
    assert {path.name for path in out.iterdir()} == others | {"model.safetensors"}
    assert all((out / name).read_bytes() == (checkpoint / name).read_bytes() for name in others)
    assert AutoTokenizer.from_pretrained(out)("the cat")["input_ids"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_files_end_where_they_would_exceed_the_size(
    tmp_path: Path, checkpoint: Path, theirs: GPT2LMHeadModel, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["export", "--checkpoint", str(checkpoint), "--output", str(out), "--max-shard-size", "20KB"]
    assert main(command) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in theirs.parameters())
    for file in files:
        tensors = load_file(out / file)
        assert {name for name, there in index["weight_map"].items() if there == file} == tensors.keys()
        assert len(tensors) == 1 or sum(4 * t.numel() for t in tensors.values()) <= 20_000
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]] == files
    assert_same_weights(out, theirs)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_another_type(tmp_path: Path, checkpoint: Path, theirs: GPT2LMHeadModel, name: str, dtype: torch.dtype) -> None:
    out = tmp_path / "out"
    # By way of the pointer; a checkpoint may be named as it may for evaluation.
    command = ["export", "--checkpoint", str(checkpoint.parent / "best"), "--output", str(out), "--dtype", name]
    assert main(command) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert_same_weights(out, theirs, dtype)


def test_only_floating_point_is_converted(tmp_path: Path) -> None:
    tensors = {"count": torch.arange(3), "scalar": torch.tensor(0.5), "empty": torch.zeros(0, 2), "half": torch.ones(2)}
    shards = [Shard("param", name, tuple(t.shape), [Piece(Box.whole(t.shape), t)]) for name, t in tensors.items()]
    folder = save(tmp_path / "checkpoints", [shards], lambda folder: None)
    exporting.export(folder, tmp_path / "out", torch.float16, 1 << 30, lambda line: None)
    found = load_file(tmp_path / "out" / "model.safetensors")
    types = {name: t.dtype for name, t in found.items()}
    assert types == dict.fromkeys(tensors, torch.float16) | {"count": torch.int64}
    assert all(torch.equal(found[name].to(t.dtype), t) for name, t in tensors.items())


@pytest.mark.slow
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path, large: Path) -> None:
    program = f"""
import re
import crosstrain_plugins.builtin.commands.export.folder, crosstrain.inference.open_checkpoint  # not measured
from crosstrain.cli.main import main

def peak():  # of resident memory; getrusage would give the parent's, which a child inherits when it is forked
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1]) * 1024

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forgets the peak of the imports
before = peak()
assert main(["export", "--checkpoint", {str(large)!r}, "--output", {str(tmp_path / "out")!r}]) == 0
print("PEAK", peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")},
    )
    assert done.returncode == 0, done.stderr
    used = int(done.stdout.split("PEAK")[1])
    # The tensor itself, and its boxes in the mapped files, which count while they are mapped: twice 16 MB. A second
    # copy would make it three times, all 24 tensors 384 MB. The rest is for what a first call imports and allocates.
    assert used < (3 * 16 + 8) * MB, f"{used / MB:.1f} MB"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(found[f"w{i:02d}"].eq(i).all() for i in range(24))


@pytest.mark.slow
def test_killed_it_leaves_nothing_that_looks_finished(tmp_path: Path, large: Path) -> None:
    out = tmp_path / "out"
    arguments = ["export", "--checkpoint", str(large), "--output", str(out), "--max-shard-size", "16MiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "crosstrain", *arguments],
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: any(tmp_path.glob(".out.new/model-00002*")), process)
    kill(process)
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".out.new"]

    assert main(arguments) == 0
    assert len(list(out.glob("model-*-of-00024.safetensors"))) == 24
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, checkpoint: Path, theirs: GPT2LMHeadModel, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = checkpoint / "training-00001.safetensors"
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        line = complaint(capsys, "--checkpoint", checkpoint, "--output", tmp_path / "out")
    finally:
        victim.write_bytes(whole)
    assert f"{victim}: contents do not match" in line
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        assert "not an empty folder" in complaint(capsys, "--checkpoint", checkpoint, "--output", tmp_path / name)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
    (tmp_path / "empty").mkdir()
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "empty")]) == 0


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporting, "write_safetensors", full)
    assert "No space left" in complaint(capsys, "--checkpoint", checkpoint, "--output", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["big", "0GB", "5 XB", "-1GB", "1e3", "9" * 400])
def test_a_size_that_is_none(capsys: pytest.CaptureFixture[str], size: str) -> None:
    arguments = ("--checkpoint", ".", "--output", "y", f"--max-shard-size={size}")
    assert "such as 5GB" in complaint(capsys, *arguments)


def test_code_and_pickles_are_not_handed_on(tmp_path: Path) -> None:
    def write_config(folder: Path) -> None:
        for name in ("modeling_trap.py", "pytorch_model.bin", "training.pt", "vocab.txt"):
            (folder / name).write_text("anything")

    weight = torch.ones(2)
    folder = save(tmp_path / "checkpoints", [[Shard("param", "w", (2,), whole_pieces(weight, (2,)))]], write_config)
    exporting.export(folder, tmp_path / "out", None, 1 << 30, lambda line: None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "vocab.txt"]


def test_only_what_transformers_knows_is_handed_on(tmp_path: Path) -> None:
    known = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "activation_function": "gelu",
        "hidden_size": 8, "an_older_number": 7, "task_specific_params": None,
    }  # fmt: skip
    foreign = {
        "quantization_config": {"quant_method": "evil"}, "auto_map": {"AutoConfig": "evil.Evil"}, "draft": "evil/model",
        "nested": [{"a": ["evil/model"]}], "name_or_path": "evil/model",
    }  # fmt: skip
    usual = {"temperature": 0.5, "eos_token_id": [1, 2], "cache_implementation": "static"}

    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(known | foreign))
        helped = usual | {"assistant_model": "evil", "helper": "evil"}
        (folder / "generation_config.json").write_text(json.dumps(helped))
        (folder / "vocab.txt").write_text("[PAD]\n.\na\nü\n")
        (folder / "tokenizer.model").write_bytes(pickle.dumps(print))
        (folder / "spm.model").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        (folder / "spiece.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")  # SentencePiece's
        (folder / "tiktoken.model").write_bytes(b"IQ== 0\nIg== 1\n")
        (folder / "merges.txt").write_bytes(b"PK\x03\x04\0\0")
        (folder / "added_tokens.json").write_bytes(pickle.dumps({}))

    weight, said = torch.ones(2), list[str]()
    folder = save(tmp_path / "checkpoints", [[Shard("param", "w", (2,), whole_pieces(weight, (2,)))]], write)
    exported = exporting.export(folder, tmp_path / "out", None, 1 << 30, said.append)
    assert exported.architecture == "GPT2LMHeadModel"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == known
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == usual
    left = {"tokenizer.model", "spm.model", "merges.txt", "added_tokens.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "vocab.txt",
        "spiece.model",
        "tiktoken.model",
    }
    assert {line.partition(":")[0] for line in said if "its contents do not match its name" in line} == left
    left_out = "auto_map, draft, name_or_path, nested, quantization_config"
    assert f"config.json: left out keys that are unknown or name code or files: {left_out}" in " ".join(said)


@pytest.mark.parametrize(
    "named", [["Evil"], ["GPT2LMHeadModel", "Evil"], "GPT2LMHeadModel", {"a": "b"}, ["Path"], [["a"]]]
)
def test_an_invented_architecture_is_left_out(tmp_path: Path, named: Any) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": named}))

    weight = torch.ones(2)
    folder = save(tmp_path / "checkpoints", [[Shard("param", "w", (2,), whole_pieces(weight, (2,)))]], write)
    exporting.export(folder, tmp_path / "out", None, 1 << 30, lambda line: None)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "gpt2"}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_parts_of_a_vision_language_model_open_alone(
    frozen: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    language = Qwen2Config(**{key: value for key, value in LANGUAGE.items() if key != "name"})
    torch.manual_seed(0)
    Qwen2ForCausalLM(language).save_pretrained(tmp_path / "qwen")
    project = write_project(tmp_path / "project.yaml", shapes(tmp_path))
    prepare_data(load_config(project))
    own = {"name": "qwen", "pretrained": str(tmp_path / "qwen")}
    settings = yaml.safe_load(project.read_text())
    settings["model"]["language_model"] = {"model": own, "lora": {"rank": 2}, "freeze": frozen}
    project.write_text(yaml.safe_dump(settings))
    run = train(project, "out", "run.max_iters=2", "run.init_lr=0.1")

    export = ["export", "--checkpoint", str(run.folder)]
    for part in ("language_model", "adapter"):
        code = main([*export, "--part", part, "--output", str(tmp_path / part)])
        assert code == (part == "adapter" and not frozen)
    said = capsys.readouterr()
    assert "Qwen2ForCausalLM.from_pretrained(" in said.out
    assert ("the base weights were trained too" in said.err) is not frozen
    assert (tmp_path / "adapter").exists() is frozen
    found, problems = Qwen2ForCausalLM.from_pretrained(tmp_path / "language_model", output_loading_info=True)
    assert not any(problems.values()), problems
    base = Qwen2ForCausalLM.from_pretrained(tmp_path / "qwen")
    if frozen:
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
        ids = torch.arange(12)[None]
        with torch.no_grad():
            merged, separate = found(ids).logits, adapted(ids).logits
            with adapted.disable_adapter():
                start = adapted(ids).logits
        # W x + s B (A x) in another order than (W + s B A) x, in fp32.
        torch.testing.assert_close(merged, separate, rtol=1e-4, atol=1e-5)
        assert (merged - start).abs().max() > 1e-3  # the adapter has learned something
        assert (tmp_path / "adapter" / "tokenizer.json").exists()
    assert main([*export, "--part", "visual", "--output", str(tmp_path / "none")]) == 1
    known = "adapter, vision, qformer, projector, language_model"
    assert f"no part 'visual' to export; known: {known}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_without_parts_has_none_to_export(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = train(workspace.project, "out", "run.max_iters=1"), workspace.path / "exported"
    for part, said in ("adapter", "has no adapter"), ("language_model", "gpt2 has no part 'language_model' to export"):
        assert said in complaint(capsys, "--checkpoint", run.folder, "--part", part, "--output", output)
    assert not list(workspace.path.glob("*exported*"))


def test_the_mean_of_the_last_checkpoints(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(workspace.project, "averaged", "run.save_interval=5", "run.keep_last=null", "run.max_iters=20")
    out = workspace.path / "mean"
    capsys.readouterr()
    assert main(["export", "--checkpoint", str(run.checkpoint(15)), "--average", "3", "--output", str(out)]) == 0
    stored = [load_file(run.checkpoint(step) / "model.safetensors") for step in (5, 10, 15)]
    mean = load_file(out / "model.safetensors")
    assert mean.keys() == stored[0].keys()
    for name, value in mean.items():
        expected = sum(weights[name].double() for weights in stored) / 3
        assert torch.equal(value, expected.to(value.dtype)), name
    assert not torch.equal(mean["transformer.wte.weight"], stored[1]["transformer.wte.weight"])
    said = complaint(capsys, "--checkpoint", run.checkpoint(15), "--average", "4", "--output", workspace.path / "more")
    assert "has 3 checkpoints up to step_000015, not 4" in said
