"""Life under the megatron runner's layouts: resuming, evaluating, generating, exporting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import Run, Workspace
from crosstrain.checkpoint.files import Reader
from fixtures_qwen import use
from fixtures_ranks import mostly_slow, run_ranks, train
from fixtures_training import TOLERANCE, compare, evaluate, relative, sized

LAYOUTS = [
    "megatron_tp2@2", "megatron_tp4@4", "megatron_tp2_sp@2", "megatron_pp2@2", "megatron_tp2_pp2@4", "megatron_tp2@4",
    "megatron_pp2@4", "megatron_tp2_zero1@4", "megatron_tp2_fsdp@4", "megatron_tp2_offload@2",
]  # fmt: skip
OTHERS = ["ddp@1", "ddp@2", "fsdp@2", "zero1@2", "zero2@2", "zero3@2"]
OPTIONS = (
    "run.max_iters=20", "run.lr_decay_iters=20", "run.global_batch_size=8", "run.micro_batch_size=2",
    "run.save_interval=10", "model.dropout=0", "model.n_head=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> tuple[Workspace, Run]:
    workspace = Workspace(tmp_path_factory.mktemp("life"), dataset)
    return workspace, train(workspace.project, "uninterrupted", *OPTIONS)


def begin(workspace: Workspace, writer: str) -> Path:
    """The folder of a run of ten steps under `writer`, made once."""
    folder = workspace.path / f"first_{writer}"
    if not folder.exists():
        runner, size = sized(writer)
        train(workspace.project, folder.name, *OPTIONS, f"run.runner={runner}", "run.max_iters=10", size=size)
    return folder


def resume(workspace: Workspace, writer: str, reader: str) -> Run:
    """Ten steps under `writer`, the rest under `reader`."""
    kept = begin(workspace, writer)
    name = f"{writer}_{reader}"
    shutil.copytree(kept, workspace.path / name)
    runner, size = sized(reader)
    return train(workspace.project, name, *OPTIONS, f"run.runner={runner}", size=size)


def pairs() -> list[str]:
    """Every layout writes for one other runner and reads from the next; and a round through the layouts."""
    out = []
    for i, layout in enumerate(LAYOUTS):
        writers, readers = OTHERS[(i + 1) % len(OTHERS)], OTHERS[i % len(OTHERS)]
        out += [f"{layout} {readers}", f"{writers} {layout}", f"{layout} {LAYOUTS[(i + 3) % len(LAYOUTS)]}"]
    return out


@pytest.mark.parametrize("pair", mostly_slow(pairs(), []))
def test_any_layout_goes_on_from_any_other(uninterrupted: tuple[Workspace, Run], pair: str) -> None:
    workspace, one = uninterrupted
    resumed = resume(workspace, *pair.split())
    assert resumed.column("step") == list(range(1, 21))
    assert resumed.column("samples") == one.column("samples")
    assert relative(resumed.column("loss"), one.column("loss")) < TOLERANCE


@pytest.mark.slow
def test_a_checkpoint_holds_no_padding_and_nothing_twice(uninterrupted: tuple[Workspace, Run]) -> None:
    workspace, one = uninterrupted
    written = Reader.open(begin(workspace, "megatron_tp2@2") / "checkpoints" / "step_000010")
    plain = Reader.open(one.checkpoint(10))
    assert {key: t.shape for key, t in written.tensors.items()} == {key: t.shape for key, t in plain.tensors.items()}
    assert written.tensors["param", "transformer.wte.weight"].shape == (320, 32)
    boxes = written.tensors["param", "transformer.h.0.attn.c_attn.weight"].boxes
    assert len(boxes) == 6, "two ranks with slices of queries, keys and values"


# ---- evaluation and generation where the model is spread


MODELS = ["gpt2", "qwen"]


@pytest.fixture(scope="module", params=mostly_slow(MODELS, ["gpt2"]))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    """A checkpoint written at TP2, and what one process makes of it."""
    workspace = Workspace(tmp_path_factory.mktemp(request.param), dataset)
    options = OPTIONS[:-2]
    if request.param == "qwen":
        use(
            workspace,
            vocab_size=320,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
    else:
        options = OPTIONS
    run = train(workspace.project, "run", *options, "run.runner=megatron_tp2", size=2)
    checkpoint = str(run.checkpoint(20))
    [one] = run_ranks(1, evaluate, checkpoint, ("run.runner=ddp",))
    return checkpoint, one


@pytest.mark.parametrize("layout", mostly_slow([*LAYOUTS, "megatron_tp2_pp2_sp@4"], []))
def test_a_spread_model_evaluates_and_generates_as_one_process_does(trained: Any, layout: str) -> None:
    checkpoint, (loss, logits, tokens) = trained
    runner, size = sized(layout)
    for there in run_ranks(size, evaluate, checkpoint, (f"run.runner={runner}",)):
        assert there[0] == pytest.approx(loss, rel=TOLERANCE)
        assert len(there[1][0]) == 320, "logits of padding"
        assert torch.allclose(torch.tensor(there[1]), torch.tensor(logits), rtol=0, atol=1e-5)  # of logits around 5
        assert there[2] == tokens


@pytest.mark.slow
def test_evaluate_generates_from_a_tensor_parallel_checkpoint_with_one_process(workspace: Workspace) -> None:
    options = ("run.max_iters=2", "run.runner=megatron_tp2", "run.micro_batch_size=4")
    train(workspace.project, "out", *options, size=2)
    done = workspace.evaluate(
        "--checkpoint",
        "out",
        "--generate",
        "ban",
        "--max-new-tokens",
        "8",
        "--output",
        "said.json",
        "--options",
        "run.runner=ddp",
    )
    assert done.code == 0, done.err
    said = json.loads((workspace.path / "said.json").read_text())
    assert said["completions"][0]["prompt"] == "ban"
    assert said["completions"][0]["completions"][0]


@pytest.mark.slow
def test_evaluate_generates_in_the_layout_that_is_asked_for(workspace: Workspace) -> None:
    train(workspace.project, "out", "run.max_iters=2")
    said = []
    for runner, size in (("ddp", 1), ("megatron_tp2", 2), ("megatron_tp2_pp2", 4)):
        done = workspace.evaluate(
            "--checkpoint",
            "out",
            "--generate",
            "ban",
            "--max-new-tokens",
            "8",
            "--temperature",
            "0",
            "--output",
            f"{runner}.json",
            "--nproc-per-node",
            str(size),
            "--options",
            f"run.runner={runner}",
        )
        assert done.code == 0, done.err
        said.append(json.loads((workspace.path / f"{runner}.json").read_text())["completions"])
    assert said[0] == said[1] == said[2]


@pytest.mark.slow
def test_an_export_has_the_vocabulary_of_the_model_and_its_logits(workspace: Workspace, tmp_path: Path) -> None:
    from crosstrain_plugins.builtin.commands.export.folder import export

    run = train(
        workspace.project, "big", "run.max_iters=3", "run.runner=megatron_tp2", "model.vocab_size=50257", size=2
    )
    export(run.checkpoint(3), tmp_path / "folder", None, 1 << 40, lambda _: None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    assert theirs.get_input_embeddings().weight.shape[0] == 50257
    ranks = run_ranks(2, _logits, str(run.checkpoint(3)), ("run.runner=megatron_tp2",))
    with torch.no_grad():
        expected = theirs(torch.tensor([[1, 2, 3]])).logits[0, -1]
    for logits, rows in ranks:
        assert rows == 50432 // 2
        # Products are summed in another order; logits are around 1.
        assert torch.allclose(torch.tensor(logits), expected, rtol=0, atol=1e-5)


def _logits(checkpoint: str, options: tuple[str, ...]) -> tuple[list[float], int]:
    """Logits after a prompt, and how many rows of the vocabulary this rank has."""
    from crosstrain.engine.build import build_model, make_runner
    from crosstrain.inference.open_checkpoint import saved_config

    config = saved_config(Path(checkpoint), list(options))
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, Path(checkpoint), for_training=False)
    with runner.evaluating():
        logits = runner.evaluate({"input_ids": torch.tensor([[1, 2, 3]])})[0].tolist()
    rows = len(runner.held.weight(runner.model.lm.transformer.wte.weight))
    runner.close()
    return logits, rows


@pytest.mark.slow
def test_compare_finds_that_layouts_train_alike(workspace: Workspace) -> None:
    layouts = ("megatron_tp2@2", "megatron_tp2_pp2_sp@4", "megatron_tp2_zero1@4")
    done = compare(workspace, "ddp@1", *layouts, options=("model.dropout=0", "model.n_head=4"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trains alike") == 3
