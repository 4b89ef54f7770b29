"""ZeRO gathers and sends in bf16 what autocast rounds anyway; in DeepSpeed's own mode all is bf16 but the masters."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from crosstrain_plugins.builtin.commands.plan.estimate import Project

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.training.preflight import dry_run
from crosstrain.utils.errors import ConfigError
from engine.test_deepspeed import _refuse_one
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train

# Two micro batches on each of two ranks; two ranks, because more add up in an order of their own.
OPTIONS = ("run.amp=bf16", "run.micro_batch_size=2", "run.global_batch_size=8", "model.dropout=0",
           "model.vocab_size=384", "run.grad_norm_clip=0.5")  # fmt: skip
# Nothing stays gathered, so that every use is a gather.
EVERY_USE = "stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0, stage3_prefetch_bucket_size: 0"
ZERO = {"zero1": "name: zero1", "zero2": "name: zero2", "zero3": f"name: zero3, {EVERY_USE}",
        "small buckets": "name: zero2, reduce_bucket_size: 3000"}  # fmt: skip
MESSAGE = 32  # bytes: all-reduces of losses, norms and flags, which the plan leaves out, are no longer
# bf16 rounds at 4e-3; the largest difference of losses seen over six steps was 2.8e-4.
BF16_TOLERANCE = 2e-3


def _train(project: str, options: tuple[str, ...]) -> tuple[list[float], list[tuple[str, str, int]]]:
    """Losses, and kind, type and bytes of each exchange between the ranks in the second step."""
    from fixtures_calls import Recorder

    trainer = make_trainer(project, options)
    runner, losses, recorder = trainer.runner, list[float](), Recorder()
    compute, step, steps = runner.forward_backward, runner.optimizer_step, list[int]()

    def recorded(function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            with recorder if len(steps) == 2 else nullcontext():
                return function(*args, **more)

        return call

    def forward_backward(*args: Any) -> float:
        steps.append(len(steps))
        losses.append(recorded(compute)(*args))
        return losses[-1]

    runner.forward_backward, runner.optimizer_step = forward_backward, recorded(step)
    trainer.fit()
    runner.close()
    sent = [c for c in recorder.calls if c.kind != "all_reduce" or c.sent > MESSAGE]
    return losses, [(c.kind, c.dtype, c.sent) for c in sent]


def _sent(workspace: Workspace, options: list[str]) -> int:
    """Bytes that the plan says."""
    config = load_config(workspace.project, options)
    ready = dry_run(config, 2)
    return Project(config, ready.model, ready.sample).estimate(config, 2).sent


@pytest.mark.parametrize("zero", mostly_slow(ZERO, []))
def test_half_of_the_bytes_are_sent_and_losses_stay(workspace: Workspace, zero: str) -> None:
    found, sent, counts = {}, {}, {}
    for name in ("fp32", "amp", "bf16"):
        options = [*OPTIONS, "run.max_iters=5", f"run.runner={{{ZERO[zero]}, param_dtype: {name}}}"]
        folder = f"run.output_dir={workspace.path}/{name}"
        found[name], calls = run_ranks(2, _train, str(workspace.project), (*options, folder))[0]
        planned = _sent(workspace, options)
        sent[name], counts[name] = Counter[str](), Counter(kind for kind, _, _ in calls)
        for kind, dtype, size in calls:
            sent[name][f"{kind} {dtype}".strip()] += size
        assert sum(sent[name].values()) == planned, name
    assert found["amp"] == found["fp32"], "something is rounded that autocast does not round"
    assert found["bf16"] == pytest.approx(found["fp32"], rel=BF16_TOLERANCE)
    assert found["bf16"] != found["fp32"]
    fp32, amp, bf16 = (sent[name] for name in ("fp32", "amp", "bf16"))
    assert 2 * amp["all_gather bfloat16"] == fp32["all_gather float32"] - amp["all_gather float32"] > 0
    assert 2 * bf16["all_gather bfloat16"] == fp32["all_gather float32"]
    if zero == "zero3":
        assert amp["reduce_scatter float32"] == fp32["reduce_scatter float32"]
        assert 2 * bf16["reduce_scatter bfloat16"] == fp32["reduce_scatter float32"]
    else:
        assert 2 * amp["reduce float32"] == 4 * bf16["reduce bfloat16"] == fp32["all_reduce float32"]
        assert sum(amp.values()) < 0.6 * sum(fp32.values())
    assert counts["bf16"].total() <= counts["amp"].total()


def _held(project: str, options: tuple[str, ...]) -> dict[tuple[str, str], tuple[Any, list[Any]]]:
    """Parameters and moments that this rank has after it began."""
    trainer = make_trainer(project, options)
    found = {
        (shard.kind, shard.name): (shard.shape, [(p.box.offset, p.box.shape, p.data.numpy()) for p in shard.pieces])
        for shard in trainer.runner.held.shards()
        if shard.shape
    }
    assert all(data.dtype == np.float32 for _, pieces in found.values() for _, _, data in pieces)
    trainer.runner.close()
    return found


def _loaded(workspace: Workspace, size: int, runner: str, checkpoint: Any) -> dict[tuple[str, str], np.ndarray]:
    """Everything that the ranks hold together once they have loaded a checkpoint."""
    options = (*OPTIONS, f"run.runner={runner}", f"run.resume_from={checkpoint}", "run.max_iters=9",
               f"run.output_dir={workspace.path}/begun")  # fmt: skip
    whole: dict[tuple[str, str], np.ndarray] = {}
    for held in run_ranks(size, _held, str(workspace.project), options):
        for key, (shape, pieces) in held.items():
            array = whole.setdefault(key, np.full(shape, np.nan, np.float32))
            for offset, extent, data in pieces:
                array[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] = data.reshape(extent)
    assert not any(np.isnan(array).any() for array in whole.values())
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("runner", ZERO)
def test_checkpoints_hold_the_fp32_masters(workspace: Workspace, runner: str) -> None:
    half = f"{{{ZERO[runner]}, param_dtype: bf16}}"
    options = (*OPTIONS, "run.lr_decay_iters=6")
    first = train(workspace.project, "ddp", *options, "run.max_iters=2", "run.runner=ddp", size=2)
    theirs, ours = (_loaded(workspace, 2, name, first.folder) for name in ("ddp", half))
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[key], ours[key]) for key in theirs), "loading a checkpoint of ddp rounds"
    whole = train(workspace.project, "whole", *options, "run.max_iters=6", f"run.runner={half}", size=2)
    train(workspace.project, "parts", *options, "run.max_iters=3", f"run.runner={half}", size=2)
    parts = train(workspace.project, "parts", *options, "run.max_iters=6", f"run.runner={half}", size=2)
    assert parts.column("loss") == whole.column("loss"), "a resumed run goes another way"
    theirs, ours = (_loaded(workspace, 2, name, parts.folder) for name in ("ddp", half))
    assert all(np.array_equal(theirs[key], ours[key]) for key in theirs), "ddp does not continue from the masters"
    masters = theirs["param", next(name for kind, name in theirs if kind == "param" and "c_fc.weight" in name)]
    assert (masters.view(np.uint32) & 0xFFFF).any(), "what is stored are bf16 numbers"


LINEAR = 'run.freeze=["transformer.w?e.weight", "*ln_*", "*.bias"]'  # nothing is trained but linear layers' weights


@pytest.mark.slow
@pytest.mark.parametrize("more", [("amp",), ("bf16",), ("amp", LINEAR)])
@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
def test_a_refused_step_changes_nothing(workspace: Workspace, zero: str, more: tuple[str, ...]) -> None:
    options = (*OPTIONS, f"run.runner={{name: {zero}, param_dtype: {more[0]}}}", *more[1:],
               f"run.output_dir={workspace.path}/out", "run.global_batch_size=16")  # fmt: skip
    norms, before, after, *losses = run_ranks(2, _refuse_one, str(workspace.project), options)[0]
    assert norms[0] == norms[1]
    assert before == after
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("runner", "more", "sentence"),
    [
        ("{name: zero2, param_dtype: bf16}", ["run.amp=fp32"], "param_dtype: bf16 needs run.amp=bf16"),
        ("{name: zero0, param_dtype: bf16}", [], "bf16 needs ZeRO stage 1, 2 or 3, without nvme"),
        ("{name: zero3_nvme, param_dtype: bf16}", [], "bf16 needs ZeRO stage 1, 2 or 3, without nvme"),
        ("{name: zero2, param_dtype: bf16}", [LINEAR], "would round frozen parameters"),
    ],
)
def test_what_does_not_go_together_is_said(workspace: Workspace, runner: str, more: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _sent(workspace, [*OPTIONS, f"run.runner={runner}", *more])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
@pytest.mark.parametrize("zero", ["zero2", "zero2_offload", "zero3_offload"])
def test_other_optimizers_train_alike(workspace: Workspace, zero: str, optimizer: str) -> None:
    options = (*OPTIONS, "run.max_iters=4", f"run.optimizer={optimizer}")
    half, whole = (
        train(workspace.project, name, *options, f"run.runner={{name: {zero}, param_dtype: {name}}}", size=2)
        for name in ("amp", "fp32")
    )
    assert half.column("loss") == whole.column("loss")
