"""Local SGD with an outer optimizer: one file of public names, held to a simulation in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import Run, Workspace
from crosstrain.checkpoint.files import Reader
from crosstrain.config.load import load_config
from crosstrain.engine.checks import batch_plan
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train

HERE = Path(__file__).parent
TOLERANCE = 2e-5  # of a tensor's norm
PLAIN = ("model.dropout=0", "run.grad_norm_clip=0", "run.weight_decay=0")
SGD = (*PLAIN, "run.optimizer={name: sgd, momentum: 0.9}", "run.init_lr=0.05", "run.min_lr=0.05")
ADAMW = (*PLAIN, "run.optimizer=adamw", "run.init_lr=0.002", "run.min_lr=0.002")


def local_sgd(**options: Any) -> tuple[str, str]:
    given = ", ".join(f"{key}: {value}" for key, value in options.items())
    return f"run.plugins=[{HERE}]", f"run.runner={{name: local_sgd, {given}}}"


def tensors(run: Run, step: int, kind: str = "param") -> dict[str, torch.Tensor]:
    reader = Reader.open(run.checkpoint(step))
    reader.tensors = {("param", name): stored for (k, name), stored in reader.tensors.items() if k == kind}
    return {name: reader.whole(name) for name in reader.names("param")}


def begin(project: str, options: tuple[str, ...], steps: int) -> tuple[dict[str, np.ndarray], list[Any]]:
    """The initial weights, and the micro batches of this rank, step by step."""
    trainer = make_trainer(project, options)
    stream = trainer.batches()
    out = [[{k: v.numpy() for k, v in micro.data.items()} for micro in next(stream)] for _ in range(steps)]
    initial = {n: p.detach().numpy() for n, p in trainer.runner.model.weights.parameters().items()}
    trainer.runner.close()
    return initial, out


@pytest.mark.parametrize("inner", mostly_slow([SGD, ADAMW], [ADAMW]), ids=["sgd", "adamw"])
def test_values_are_those_of_a_simulation(shared_workspace: Workspace, inner: tuple[str, ...]) -> None:
    """Two replicas in one process, with torch's optimizers only: 3 steps apart, then an outer step, over 7 steps."""
    from transformers import AutoModelForCausalLM

    kind = "adamw" if inner is ADAMW else "sgd"
    outer = local_sgd(inner_steps=3, outer_lr=0.7, outer_momentum=0.9)
    project = shared_workspace.project
    run = train(project, f"local_{kind}", *inner, *outer, "run.max_iters=7", "run.save_interval=100", size=2)
    folder = project.parent / f"read_{kind}"
    begun = run_ranks(2, begin, str(project), (*inner, f"run.output_dir={folder}"), 7)
    initial, data = begun[0][0], [batches for _, batches in begun]

    def replica() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = AutoModelForCausalLM.from_pretrained(run.checkpoint(7)).train()
        for name, p in model.named_parameters():
            p.data.copy_(torch.from_numpy(initial[name])[: len(p)])  # without padding
        if kind == "sgd":
            return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return model, torch.optim.AdamW(model.parameters(), 0.002, weight_decay=0)

    replicas = [replica() for _ in range(2)]
    anchor = [p.detach().clone() for p in replicas[0][0].parameters()]
    momentum = [torch.zeros_like(p) for p in anchor]
    for step in range(1, 8):
        for (model, optimizer), own in zip(replicas, data, strict=True):
            total = sum(int((micro["labels"] != -100).sum()) for micro in own[step - 1])
            for micro in own[step - 1]:
                logits = model(torch.from_numpy(micro["input_ids"])).logits.flatten(0, 1)
                labels = torch.from_numpy(micro["labels"]).flatten()
                (torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / total).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 3 == 0 or step == 7:  # the end is a meeting, too
            for i, (a, b) in enumerate(zip(*(list(m.parameters()) for m, _ in replicas), strict=True)):
                change = anchor[i] - (a.detach() + b.detach()) / 2
                momentum[i] = 0.9 * momentum[i] + change
                anchor[i] = anchor[i] - 0.7 * (change + 0.9 * momentum[i])
                a.data.copy_(anchor[i])
                b.data.copy_(anchor[i])
    found = tensors(run, 7)
    for name, expected in replicas[0][0].named_parameters():
        here, there = found[name].view_as(expected), expected.detach()
        if name.endswith("c_attn.bias"):  # a key's has no gradient, and Adam makes steps of its rounding
            here, there = (torch.cat([t[:32], t[64:]]) for t in (here, there))
        assert (here - there).norm() <= TOLERANCE * there.norm(), name
    held = tensors(run, 7, "runner:outer_momentum")
    for (name, p), expected in zip(replicas[0][0].named_parameters(), momentum, strict=True):
        if not name.endswith("c_attn.bias"):
            rounding = 2**-22 * p.norm()  # of the weights, of which a change is a difference
            assert (held[name].view_as(expected) - expected).norm() <= TOLERANCE * expected.norm() + rounding, name


@pytest.mark.slow
def test_one_inner_step_without_momentum_is_ddp(shared_workspace: Workspace) -> None:
    plain = (*PLAIN, "run.optimizer=sgd", "run.init_lr=0.05")
    outer = local_sgd(inner_steps=1, outer_lr=1.0, outer_momentum=0.0, nesterov="false")
    ddp = train(shared_workspace.project, "ddp", *plain, size=2)
    local = train(shared_workspace.project, "every_step", *plain, *outer, size=2)
    assert local.column("samples") == ddp.column("samples")
    assert local.column("loss") == pytest.approx(ddp.column("loss"), rel=2e-6)
    expected = tensors(ddp, 20)
    for name, value in tensors(local, 20).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(shared_workspace: Workspace) -> None:
    """Each rank's own moments are kept: a save is a meeting, so both runs save at the same steps."""
    options = (*ADAMW, *local_sgd(inner_steps=3), "run.save_interval=5", "run.keep_last=10")
    whole = train(shared_workspace.project, "whole", *options, "run.max_iters=10", size=2)
    train(shared_workspace.project, "halves", *options, "run.max_iters=5", "run.lr_decay_iters=10", size=2)
    halves = train(shared_workspace.project, "halves", *options, "run.max_iters=10", size=2)
    assert halves.column("loss") == whole.column("loss")
    kinds, again = (Reader.open(run.checkpoint(10)).kinds() for run in (whole, halves))
    assert kinds == again
    assert {"param", "runner:outer_momentum", "runner:0:exp_avg", "runner:1:exp_avg"} < kinds
    for kind in kinds:
        expected, found = tensors(whole, 10, kind), tensors(halves, 10, kind)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), kind
    first, second = tensors(whole, 10, "runner:0:exp_avg"), tensors(whole, 10, "runner:1:exp_avg")
    assert not all(torch.equal(second[name], value) for name, value in first.items()), "ranks have moments of their own"


def _count_collectives(project: str, options: tuple[str, ...]) -> list[int]:
    """Collectives of each step, of torch and so of everything above it."""
    import torch.distributed as dist

    trainer = make_trainer(project, options)
    calls, steps = [0], []
    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")
    originals = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counted(name))
    stream = trainer.batches()
    for _ in range(6):
        before = calls[0]
        trainer.train_step(stream)
        steps.append(calls[0] - before)
    trainer.runner.close()
    return steps


def test_steps_apart_have_no_collective(shared_workspace: Workspace) -> None:
    options = (*ADAMW, *local_sgd(inner_steps=3), f"run.output_dir={shared_workspace.path / 'counted'}")
    options = (*options, "run.save_interval=100", "run.max_iters=100")
    for steps in run_ranks(2, _count_collectives, str(shared_workspace.project), options):
        assert [bool(count) for count in steps] == [False, False, True] * 2


@pytest.mark.slow
def test_other_runners_and_layouts(shared_workspace: Workspace) -> None:
    """ddp begins a local run; ddp goes on with new moments; other numbers of ranks and settings are refused."""
    project, outer = shared_workspace.project, local_sgd(inner_steps=3)
    train(project, "from_ddp", *ADAMW, "run.max_iters=4", size=2)
    run = train(project, "from_ddp", *ADAMW, *outer, "run.max_iters=8", size=2)
    assert run.rows[-1]["step"] == 8
    with pytest.raises(AssertionError, match="has a separate optimizer state for each rank"):
        train(project, "from_ddp", *ADAMW, "run.max_iters=9", size=2)
    with pytest.raises(
        AssertionError, match="without runner:2:exp_avg; resume with the same runner and number of ranks"
    ):
        train(project, "from_ddp", *ADAMW, *outer, "run.max_iters=9", "run.global_batch_size=12", size=3)
    run = train(project, "from_ddp", *ADAMW, "run.max_iters=9", "run.resume_optimizer=false", size=2)
    assert run.rows[-1]["step"] == 9
    for option, sentence in (
        ("run.amp=fp16", "one loss scale for all"),
        ("run.on_bad_step=skip", "affects only one rank"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            batch_plan(load_config(project, [*outer, option]), 2)
