"""Partly trained models: what is frozen costs nothing in a checkpoint, and must be what it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from conftest import Run, Workspace
from crosstrain.checkpoint.boxes import Box, flat_range_pieces
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.load_weights import fingerprint
from crosstrain.cli.main import main
from fixtures_processes import program
from fixtures_ranks import mostly_slow, train
from fixtures_training import TOLERANCE, relative, sized, stored

FROZEN = ["transformer.wte.*", "transformer.wpe.*", "transformer.h.0.*"]
OPTIONS = (
    "run.max_iters=12", "run.lr_decay_iters=12", "run.global_batch_size=8", "run.micro_batch_size=2",
    "run.save_interval=6", "model.dropout=0.1",
)  # fmt: skip


def pretrained(folder: Path, seed: int = 0) -> Path:
    """A tiny GPT-2 as transformers itself writes one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=320, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=319)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def partly(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> tuple[Workspace, Run]:
    workspace = Workspace(tmp_path_factory.mktemp("frozen"), dataset)
    workspace.config["model"] = {"arch": "gpt2", "pretrained": str(pretrained(workspace.path / "base"))}
    workspace.config["run"]["freeze"] = FROZEN
    workspace.project.write_text(json.dumps(workspace.config))
    return workspace, train(workspace.project, "ddp@1", *OPTIONS)


def is_frozen(name: str) -> bool:
    return any(part in name for part in ("wte", "wpe", "h.0."))


def test_frozen_parameters_are_recorded_and_not_stored(partly: tuple[Workspace, Run]) -> None:
    _, run = partly
    checkpoint = run.checkpoint(12)
    names = stored(checkpoint)
    assert names
    assert not any(is_frozen(name) for name in names)
    assert all(map(is_frozen, Reader.open(checkpoint).frozen))
    assert not (checkpoint / "model.safetensors").exists(), "half a Hugging Face folder"
    assert run.rows[-1]["loss"] < run.rows[0]["loss"]


@pytest.mark.parametrize("name", mostly_slow(["fsdp@2", "zero1@2", "zero2@2", "zero3@2"], []))
def test_partly_trained_models_train_and_resume_alike(partly: tuple[Workspace, Run], name: str) -> None:
    workspace, one = partly
    runner, size = sized(name)
    shutil.copytree(one.folder, workspace.path / name)
    shutil.rmtree(workspace.path / name / "checkpoints" / "step_000012")
    resumed = train(workspace.project, name, *OPTIONS, f"run.runner={runner}", size=size)
    assert resumed.column("step") == list(range(1, 13))
    assert relative(resumed.column("loss"), one.column("loss")) < TOLERANCE
    assert relative(resumed.column("grad_norm"), one.column("grad_norm")) < TOLERANCE
    assert Reader.open(resumed.checkpoint(12)).frozen == Reader.open(one.checkpoint(12)).frozen
    assert not any(is_frozen(n) for n in stored(resumed.checkpoint(12)))


@pytest.mark.parametrize("runner", mostly_slow(["ddp", "zero3"], ["ddp"]))
def test_another_base_is_refused_by_name(partly: tuple[Workspace, Run], tmp_path: Path, runner: str) -> None:
    workspace, one = partly
    base = workspace.path / "base" / "model.safetensors"
    kept = base.read_bytes()
    tensors = load_file(base)
    tensors["transformer.h.0.mlp.c_fc.weight"][3, 5] += 1e-6
    shutil.copytree(one.folder, workspace.path / f"other_{runner}")
    try:
        save_file(tensors, base, {"format": "pt"})
        with pytest.raises(AssertionError, match=r"transformer\.h\.0\.mlp\.c_fc\.weight is frozen and differs"):
            train(workspace.project, f"other_{runner}", *OPTIONS, "run.max_iters=13", f"run.runner={runner}")
    finally:
        base.write_bytes(kept)


@pytest.mark.parametrize("runner", mostly_slow(["ddp", "zero2"], []))
def test_what_was_frozen_can_be_trained_later(partly: tuple[Workspace, Run], runner: str) -> None:
    workspace, one = partly
    name = f"thawed_{runner}"
    shutil.copytree(one.folder, workspace.path / name)
    options = ("run.max_iters=13", f"run.freeze={json.dumps(FROZEN[:2])}", f"run.runner={runner}")
    if runner == "zero2":  # of which a flat group of parameters has one count of steps
        with pytest.raises(AssertionError, match=r"step is .* for .* this runner keeps one value for both"):
            train(workspace.project, name, *OPTIONS, *options)
        return
    run = train(workspace.project, name, *OPTIONS, *options)
    tensors = {k: v for f in run.checkpoint(13).glob("*.safetensors") for k, v in load_file(f).items()}
    assert tensors["step/transformer.h.0.mlp.c_fc.weight"] == 1
    assert tensors["step/transformer.h.1.mlp.c_fc.weight"] == 13
    assert tensors["exp_avg/transformer.h.0.mlp.c_fc.weight"].count_nonzero()


def test_evaluation_and_export_find_the_base(partly: tuple[Workspace, Run]) -> None:
    from transformers import GPT2LMHeadModel

    workspace, one = partly
    out = workspace.path / "exported"
    for verb in (["evaluate", "--splits", "val", "--max-samples", "4"], ["export", "--output", str(out)]):
        said = program(workspace.path, *verb, "--checkpoint", str(one.folder))
        assert said.code == 0, said.err
    weights, base = (
        GPT2LMHeadModel.from_pretrained(out).state_dict(),
        load_file(workspace.path / "base/model.safetensors"),
    )
    trained = {k: v for f in one.checkpoint(12).glob("training*") for k, v in load_file(f).items()}
    for name in base:
        assert weights[name].equal(base[name] if is_frozen(name) else trained[name]), name


def test_frozen_without_a_source_is_stored(workspace: Workspace) -> None:
    run = train(workspace.project, "out", "run.max_iters=2", f"run.freeze={json.dumps(FROZEN)}")
    assert (run.checkpoint(2) / "model.safetensors").exists()
    assert "transformer.wte.weight" in stored(run.checkpoint(2))
    assert "exp_avg/transformer.wte.weight" not in stored(run.checkpoint(2))


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [('["transformer.x.*"]', "'transformer.x.*' matches no parameter"), ('["*"]', "every parameter is frozen")],
)
def test_patterns_are_checked_before_anything_starts(
    workspace: Workspace, patterns: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = workspace.path / "out"
    options = ["--options", f"run.output_dir={out}", f"run.freeze={patterns}"]
    assert main(["train", "--cfg-path", str(workspace.project), *options]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not out.exists()


@given(st.data())
def test_the_hash_does_not_depend_on_how_a_tensor_is_cut(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    whole: Any = fingerprint(tensor, Box.whole(shape), shape)
    flat, total = tensor.flatten(), 0
    cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=3)))
    for start, stop in zip([0, *cuts], [*cuts, flat.numel()], strict=True):
        for piece in flat_range_pieces(flat[start:stop], shape, start):
            total += fingerprint(piece.data, piece.box, shape)
    assert total % 2**64 == whole
    other = tensor.clone().flatten()
    other[data.draw(st.integers(0, flat.numel() - 1))] += 1.0
    assert fingerprint(other.view(shape), Box.whole(shape), shape) != whole
    if flat.numel() > 1 and flat[0] != flat[1]:
        swapped = flat.clone()
        swapped[[0, 1]] = flat[[1, 0]]
        assert fingerprint(swapped.view(shape), Box.whole(shape), shape) != whole, "positions count"
