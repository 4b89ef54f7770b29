"""One checkpoint: what any runner wrote, on any number of workers, any other goes on from."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import Run, Workspace
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train
from fixtures_training import HALF_TOLERANCE, TOLERANCE, relative, sized

RUNNERS = ["ddp@1", "ddp@2", "fsdp@2", "zero1@2", "zero2@2", "zero3@2", "zero3@4", "zero3_offload@2"]
OPTIONS = (
    "run.max_iters=20", "run.lr_decay_iters=20", "run.global_batch_size=8", "run.micro_batch_size=2",
    "run.save_interval=10",
)  # fmt: skip

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> tuple[Workspace, Run]:
    workspace = Workspace(tmp_path_factory.mktemp("any"), dataset)
    return workspace, train(workspace.project, "uninterrupted", *OPTIONS)


# ---- one logical state


def gathered(runner: Any) -> Tensors:
    """Parameters and moments as the engine itself puts them together: the opinion that boxes are compared with."""
    import deepspeed
    from torch.distributed.tensor import DTensor

    out: Tensors = {}
    zero = getattr(getattr(runner, "engine", None), "optimizer", None)
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False  # DeepSpeed links too early when there are several groups
        zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in runner.model.weights.parameters().items():
        shape = runner.model.weights.logical_shape(name, runner.held.full_shape(parameter))
        for key in (None, "exp_avg", "exp_avg_sq"):
            if zero is not None and hasattr(parameter, "_hp_mapping" if hasattr(zero, "bit16_groups") else "ds_id"):
                whole = (
                    deepspeed.utils.safe_get_full_fp32_param(parameter)
                    if key is None
                    else deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
                )
            else:
                whole = parameter if key is None else runner.optimizer.state[parameter][key]
                whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            logical = tuple(slice(n) for n in shape)
            whole = whole.detach().cpu().view(runner.held.full_shape(parameter))
            out[f"{key or 'param'}/{name}"] = whole[logical].numpy()
    return out


def _resume_and_step(project: str, options: tuple[str, ...]) -> tuple[Tensors, Tensors]:
    """The state as it was loaded, and as it is after the last step, which is saved; both from the engine itself."""
    trainer = make_trainer(project, options)
    runner = trainer.runner
    before = {key: value.copy() for key, value in gathered(runner).items()}
    trainer.fit()
    after = gathered(runner)
    runner.close()
    return before, after


def read(checkpoint: Path) -> Tensors:
    """A checkpoint put together from its boxes."""
    from crosstrain.checkpoint.boxes import Shard, whole_pieces
    from crosstrain.checkpoint.files import Reader

    reader, out = Reader.open(checkpoint), {}
    for (kind, name), stored in reader.tensors.items():
        whole = torch.full(stored.shape, float("nan"))
        reader.fill([Shard(kind, name, stored.shape, whole_pieces(whole, stored.shape))])
        out[f"{kind}/{name}"] = whole.numpy()
    return out


@pytest.mark.parametrize("name", mostly_slow(RUNNERS, []))
def test_readers_hold_what_was_written_and_writers_write_what_they_hold(
    uninterrupted: tuple[Workspace, Run], name: str
) -> None:
    workspace, one = uninterrupted
    runner, size = sized(name)
    folder = workspace.path / f"state_{name}"
    source = one.checkpoint(10)
    options = (
        *OPTIONS, "run.max_iters=12", f"run.runner={runner}", f"run.output_dir={folder}", f"run.resume_from={source}",
    )  # fmt: skip
    ranks = run_ranks(size, _resume_and_step, str(workspace.project), options)

    written = read(source)
    for before, _ in ranks:
        assert before.keys() == {key for key in written if not key.startswith("step/")}
        for key, tensor in before.items():
            assert np.array_equal(tensor, written[key]), f"{key} was not loaded as it was written"
    written = read(folder / "checkpoints" / "step_000012")
    assert written["step/transformer.wte.weight"] == 12
    for _, after in ranks:
        for key, tensor in after.items():
            assert np.array_equal(tensor, written[key]), f"{key} was not written as it is held"


# ---- end to end

PAIRS = random.Random(20261121).sample([(a, b) for a in RUNNERS for b in RUNNERS if a != b], 14)


def resume(workspace: Workspace, writer: str, reader: str, *options: str, label: str = "pair") -> Run:
    """Ten steps under `writer` (kept for other readers), the rest under `reader`."""
    kept = workspace.path / f"{label}_{writer}"
    if not kept.exists():
        runner, size = sized(writer)
        train(workspace.project, kept.name, *OPTIONS, *options, f"run.runner={runner}", "run.max_iters=10", size=size)
    name = f"{label}_{writer}_{reader}"
    shutil.copytree(kept, workspace.path / name)
    runner, size = sized(reader)
    return train(workspace.project, name, *OPTIONS, *options, f"run.runner={runner}", size=size)


@pytest.mark.parametrize("pair", mostly_slow(PAIRS, []))
def test_any_runner_goes_on_from_any_other(uninterrupted: tuple[Workspace, Run], pair: tuple[str, str]) -> None:
    workspace, one = uninterrupted
    writer, reader = pair
    resumed = resume(workspace, writer, reader)
    assert resumed.column("step") == list(range(1, 21))
    assert resumed.column("samples") == one.column("samples")
    assert resumed.column("lr") == one.column("lr")
    assert relative(resumed.column("loss"), one.column("loss")) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), [("zero2@2", "ddp@1"), ("ddp@2", "zero3@2"), ("fsdp@2", "zero1@2")])
@pytest.mark.parametrize("amp", ["bf16", "{dtype: fp16, initial_scale: 67108864, window: 3, hysteresis: 1}"])
def test_in_half_precision(uninterrupted: tuple[Workspace, Run], writer: str, reader: str, amp: str) -> None:
    workspace, _ = uninterrupted
    label = "bf16" if amp == "bf16" else "fp16"
    if not (workspace.path / label).exists():
        train(workspace.project, label, *OPTIONS, f"run.amp={amp}")
    one = Run(workspace.path / label)
    resumed = resume(workspace, writer, reader, f"run.amp={amp}", label=f"pair_{label}")
    assert resumed.column("loss_scale") == one.column("loss_scale")
    assert relative(resumed.column("loss"), one.column("loss")) < HALF_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), [("zero1@2", "fsdp@2"), ("zero3@2", "ddp@1"), ("ddp@1", "zero2@2")])
def test_momentum_of_sgd(uninterrupted: tuple[Workspace, Run], writer: str, reader: str) -> None:
    workspace, _ = uninterrupted
    sgd = ("run.optimizer={name: sgd, momentum: 0.9}", "run.init_lr=0.05")
    if not (workspace.path / "sgd").exists():
        train(workspace.project, "sgd", *OPTIONS, *sgd)
    resumed = resume(workspace, writer, reader, *sgd, label="pair_sgd")
    assert relative(resumed.column("loss"), Run(workspace.path / "sgd").column("loss")) < TOLERANCE
