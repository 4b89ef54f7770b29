"""DiLoCo: values of a simulation in plain torch, exact resume, few bytes, teams under other runners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from crosstrain_plugins.builtin.runners.diloco import CODECS, DiLoCo

from conftest import Run, Workspace
from crosstrain.checkpoint.boxes import Shard, own_kind, shared_kind
from crosstrain.checkpoint.files import Reader
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.engine.build import as_stored
from crosstrain.engine.checks import batch_plan
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train

TOLERANCE = 2e-5  # of a tensor's norm
PLAIN = ("model.dropout=0", "run.grad_norm_clip=0", "run.weight_decay=0")
SGD = (*PLAIN, "run.optimizer={name: sgd, momentum: 0.9}", "run.init_lr=0.05", "run.min_lr=0.05")
ADAMW = (*PLAIN, "run.optimizer=adamw", "run.init_lr=0.002", "run.min_lr=0.002")


def diloco(**options: Any) -> tuple[str]:
    given = ", ".join(f"{key}: {value}" for key, value in ({"exchange": "fp32"} | options).items())
    return (f"run.runner={{name: diloco, {given}}}",)


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
    outer = diloco(every=3, outer_lr=0.7, outer_momentum=0.9)
    project = shared_workspace.project
    run = train(project, f"diloco_{kind}", *inner, *outer, "run.max_iters=7", "run.save_interval=100", size=2)
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
        if step % 3 == 0:
            for i, (a, b) in enumerate(zip(*(list(m.parameters()) for m, _ in replicas), strict=True)):
                change = anchor[i] - (a.detach() + b.detach()) / 2
                momentum[i] = 0.9 * momentum[i] + change
                anchor[i] = anchor[i] - 0.7 * (change + 0.9 * momentum[i])
                a.data.copy_(anchor[i])
                b.data.copy_(anchor[i])
    found, others = tensors(run, 7), dict(replicas[1][0].named_parameters())
    for name, expected in replicas[0][0].named_parameters():
        here, there = found[name].view_as(expected), (expected.detach() + others[name].detach()) / 2
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
    outer = diloco(every=1, outer_lr=1.0, outer_momentum=0.0, nesterov="false")
    ddp = train(shared_workspace.project, "ddp", *plain, size=2)
    local = train(shared_workspace.project, "every_step", *plain, *outer, size=2)
    assert local.column("samples") == ddp.column("samples")
    assert local.column("loss") == pytest.approx(ddp.column("loss"), rel=2e-6)
    expected = tensors(ddp, 20)
    for name, value in tensors(local, 20).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"every": 3},
    "streaming": {"every": 4, "fragments": 2, "overlap": 1, "exchange": "int8"},
}


@pytest.mark.parametrize("setting", mostly_slow(SETTINGS, ["streaming"]))
def test_a_resumed_run_has_the_same_bits(shared_workspace: Workspace, setting: str) -> None:
    """Saves do not change training, and each team keeps its own weights, moments and exchanges under way."""
    options = (*ADAMW, *diloco(**SETTINGS[setting]), "run.keep_last=10", "run.lr_decay_iters=10")
    project = shared_workspace.project
    whole = train(project, f"{setting}_whole", *options, "run.max_iters=10", "run.save_interval=100", size=2)
    train(project, f"{setting}_halves", *options, "run.max_iters=5", "run.save_interval=3", size=2)
    halves = train(project, f"{setting}_halves", *options, "run.max_iters=10", "run.eval_interval=2", size=2)
    assert halves.column("loss") == whole.column("loss")
    kinds, again = (Reader.open(run.checkpoint(10)).kinds() for run in (whole, halves))
    assert kinds == again
    own = {f"runner:{team}:{kind}" for team in (0, 1) for kind in ("exp_avg", "runner:own")}
    assert {"param", "runner:shared", "runner:outer_momentum"} | own < kinds
    for kind in kinds:
        expected, found = tensors(whole, 10, kind), tensors(halves, 10, kind)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), kind
    weights = [tensors(whole, 10, f"runner:{team}:runner:own") for team in (0, 1)]
    for name, mean in tensors(whole, 10).items():
        torch.testing.assert_close(mean, (weights[0][name] + weights[1][name]) / 2)
    assert not all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


def _sharded(options: tuple[str, ...]) -> tuple[str, ...]:
    return (options[0].replace("name: diloco", "name: diloco, inner: fsdp"),)


@pytest.mark.parametrize("groups", mostly_slow(["[2, 1]", "[2, 2]"], ["[2, 1]"]))
def test_teams_under_fsdp_train_as_teams_under_ddp(shared_workspace: Workspace, groups: str) -> None:
    """Teams of other sizes too; the shards of a team and the whole tensors of another are one exchange."""
    size = 3 if groups == "[2, 1]" else 4
    outer = diloco(every=2, groups=groups)
    options = (*SGD, "run.max_iters=5", "run.global_batch_size=12", "run.micro_batch_size=1", "run.save_interval=100")
    plain = train(shared_workspace.project, f"ddp_{size}", *options, *outer, size=size)
    sharded = train(shared_workspace.project, f"fsdp_{size}", *options, *_sharded(outer), size=size)
    assert sharded.column("loss") == pytest.approx(plain.column("loss"), rel=2e-6)
    for kind in ("param", "runner:outer_momentum", "runner:0:momentum_buffer", "runner:1:momentum_buffer"):
        expected = tensors(plain, 5, kind)
        assert expected
        for name, value in tensors(sharded, 5, kind).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_sent_values_are_near_and_small(kind: str) -> None:
    codec = CODECS[kind]
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 5000)
    values[256:512] = 0.0
    sent = codec.encode(values)
    found = codec.decode(sent, len(values))
    assert sent.dtype == torch.uint8
    assert len(sent) <= codec.size * len(values) + 300  # the last row of int8 is padded
    largest = torch.nn.functional.pad(values.abs(), (0, 120)).view(-1, 256).amax(1).repeat_interleave(256)[:5000]
    # int8 rounds to half a step of 1/127 of its row's largest value, bf16 keeps 8 bits
    limit = {"fp32": 0 * values, "bf16": values.abs() * 2**-8, "int8": largest / 254 * 1.0001}[kind]
    assert ((found - values).abs() <= limit).all()


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
    options = (*ADAMW, *diloco(every=3), f"run.output_dir={shared_workspace.path / 'counted'}")
    options = (*options, "run.save_interval=100", "run.max_iters=100")
    for steps in run_ranks(2, _count_collectives, str(shared_workspace.project), options):
        assert [bool(count) for count in steps] == [False, False, True] * 2


@pytest.mark.slow
def test_other_runners_and_layouts(shared_workspace: Workspace) -> None:
    """Runners and numbers of teams may change; settings that need all ranks in each step are refused."""
    project, outer = shared_workspace.project, diloco(every=3)
    train(project, "from_ddp", *ADAMW, "run.max_iters=4", size=2)
    run = train(project, "from_ddp", *ADAMW, *outer, "run.max_iters=8", size=2)
    assert run.rows[-1]["step"] == 8
    run = train(project, "from_ddp", *ADAMW, "run.max_iters=9", size=2)
    assert run.rows[-1]["step"] == 9, "with the moments of the first team"
    run = train(project, "from_ddp", *ADAMW, *outer, "run.max_iters=10", size=2)
    more = (*diloco(every=3, groups=3), "run.global_batch_size=12")
    assert train(project, "from_ddp", *ADAMW, *more, "run.max_iters=11", size=3).rows[-1]["step"] == 11
    with pytest.raises(ConfigError, match="groups: 2 does not divide the 3 ranks evenly"):
        batch_plan(load_config(project, [*outer]), 3)
    with pytest.raises(ConfigError, match="deepspeed cannot train with a part of the ranks"):
        batch_plan(load_config(project, [outer[0].replace("name: diloco", "name: diloco, inner: deepspeed")]), 2)
    with pytest.raises(AssertionError, match="9 fragments need as many blocks"):
        train(project, "many", *diloco(every=9, fragments=9), "run.max_iters=2", size=2)
    for option, sentence in (
        ("run.amp=fp16", "one loss scale for all"),
        ("run.on_bad_step=skip", "affects only one rank"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            batch_plan(load_config(project, [*outer, option]), 2)


def test_the_run_goes_on_with_fewer_teams_but_not_with_too_few() -> None:
    options = registry.get("runner", "diloco").Options(groups=4, min_groups=2)
    assert {ranks: DiLoCo.sizes(options, ranks) for ranks in (2, 3, 4, 8)} == {
        2: [1, 1],
        3: [1, 1, 1],
        4: [1, 1, 1, 1],
        8: [2, 2, 2, 2],
    }
    for ranks in (1, 6):
        with pytest.raises(ConfigError, match="does not divide"):
            DiLoCo.sizes(options, ranks)


def test_teams_take_over_the_tensors_of_those_that_are_left() -> None:
    """Teams 2 and 10 are left of eleven. They become teams 0 and 1, and a new one takes the first one's tensors."""

    def own(team: int, *kinds: str) -> list[Shard]:
        return [Shard(own_kind(team, kind), "w", (1,), []) for kind in kinds]

    kinds = {shard.kind for team in (2, 10) for shard in own(team, "param", "exp_avg", "runner:residual")}
    for team, source in enumerate([2, 10, 2]):
        wanted = own(team, "param", "exp_avg", "runner:residual")
        kept = wanted[:2] if team == 2 else wanted  # errors of rounding belong to one team
        assert [s.kind for s in as_stored(kinds, wanted)] == [own_kind(source, shared_kind(s.kind)) for s in kept]
