"""`run.bitwise`: the same bits under every runner and on every number of ranks."""

from __future__ import annotations

import json
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crosstrain_plugins.builtin.runners.bitwise.backend import BACKENDS
from crosstrain_plugins.builtin.runners.bitwise.norm import exact_norm
from crosstrain_plugins.builtin.runners.bitwise.partial_sums import PartialSums, nodes_of

from conftest import Run, Workspace
from crosstrain import plan
from crosstrain.checkpoint.digests import digests
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.folders import find_checkpoint
from crosstrain.config.load import load_config
from crosstrain.distributed.group import Group
from crosstrain.engine.build import make_runner
from crosstrain.engine.checks import batch_plan
from crosstrain.utils.errors import ConfigError
from fixtures_processes import train_as_user
from fixtures_ranks import mostly_slow, run_ranks
from fixtures_training import compare

# 12 micro batches: every number of ranks from 1 to 4 has a part of the tree that is not a subtree of another's.
COMMON = (
    "run.bitwise=true",
    "run.global_batch_size=12",
    "run.micro_batch_size=1",
    "run.max_iters=6",
    "run.grad_norm_clip=0.3",
)
OTHERS = [
    "ddp@2",
    "ddp@3",
    "ddp@4",
    "fsdp@1",
    "fsdp@2",
    "fsdp@3",
    "fsdp@4",
    *(f"zero{s}@{n}" for s in (1, 2, 3) for n in (1, 2, 3, 4)),
    "megatron_pp2@2",
    "{name: megatron, pipeline_parallel: 2, pipeline_schedule: gpipe}@2",
    "megatron_pp2@4",
]


def digest(run: Run | Path) -> dict[str, str]:
    folder = run if isinstance(run, Path) else run.folder
    found = digests(Reader.open(find_checkpoint(folder)))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return found | {"metrics": repr([(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row])}


def train(workspace: Workspace, name: str, *options: str) -> Run:
    runner, _, size = name.partition("@")
    label = re.sub(r"[^\w.=@]", "", name + "".join(options))
    return train_as_user(workspace, label, f"run.runner={runner}", *COMMON, *options, nproc=int(size))


@pytest.fixture(scope="module", params=mostly_slow(["fp32", "bf16"], ["fp32"]))
def reference(request: pytest.FixtureRequest, shared_workspace: Workspace) -> Any:
    amp = f"run.amp={request.param}"
    run = train(shared_workspace, "ddp@1", amp)
    losses = run.column("loss")
    assert losses[-1] < losses[0], "nothing was learned"
    return shared_workspace, amp, run


@pytest.mark.parametrize("other", mostly_slow(OTHERS, ["fsdp@2"]))
def test_every_runner_and_number_of_ranks_gives_the_same_bits(reference: Any, other: str) -> None:
    workspace, amp, one = reference
    run = train(workspace, other, amp)
    assert digest(run) == digest(one)
    assert f"sha256:{digest(one)['weights']}" in (run.folder / "log.txt").read_text()


@pytest.mark.slow
def test_one_bit_of_one_gradient_is_found_with_its_tensor_and_step(workspace: Workspace) -> None:
    """Rank 1 of 2 has six micro batches a step, so its eighth one is in step 2. All other runners agree."""
    found = compare(workspace, "ddp@1", "zero2@2", "one_bit@2", options=(*COMMON, "model.dropout=0.1"))
    assert found.returncode == 1
    results = json.loads((workspace.path / "compare.json").read_text())
    assert results["zero2@2"]["finding"] is None
    finding = results["one_bit@2"]["finding"]
    assert (finding["phase"], finding["parameters"]) == ("gradients", ["transformer.h.1.mlp.c_fc.weight"])
    assert "in step 2" in finding["sentence"]


@pytest.mark.slow
def test_the_engines_own_sums_differ(reference: Any) -> None:
    """The control: without `bitwise`, the digests of one and of three ranks differ."""
    workspace, amp, _ = reference
    one, three = (train(workspace, name, amp, "run.bitwise=false") for name in ("ddp@1", "ddp@3"))
    assert digest(one)["weights"] != digest(three)["weights"]


@pytest.mark.slow
def test_a_run_that_changes_its_runner_and_ranks_gives_the_same_bits(reference: Any) -> None:
    workspace, amp, one = reference
    for end, name in ((2, "zero3@2"), (3, "ddp@4"), (5, "fsdp@3"), (6, "zero1@1")):
        runner, _, size = name.partition("@")
        steps = (f"run.max_iters={end}", "run.lr_decay_iters=6")
        run = train_as_user(workspace, f"changed_{amp}", f"run.runner={runner}", *COMMON, amp, *steps, nproc=int(size))
    changed, kept = digest(run), digest(one)
    assert (changed["weights"], changed["moments"]) == (kept["weights"], kept["moments"])


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["run.micro_batch_size=null"], "set run.micro_batch_size"),
        (["run.amp=fp16"], "fp16"),
        (["run.runner=megatron_tp2"], "width: 1 allows a tensor_parallel of 1, but it is 2"),
        (["run.runner=megatron_tp2", "run.bitwise.width=3"], "width: 3 allows a tensor_parallel of 3, but it is 2"),
        (
            ["run.runner={name: fsdp, context_parallel: 2}"],
            "slices: 1 is not a power of two that is a multiple of context_parallel=2",
        ),
        (["run.bitwise.slices=3"], "slices: 3 is not a power of two"),
        (
            ["run.runner={name: fsdp, context_parallel: 2}", "run.bitwise={slices: 2, width: 3}"],
            "width: 3 is not a multiple of context_parallel=2",
        ),
        (["run.bitwise.slices=2", "run.objective=dpo"], "run.objective, which needs whole sequences"),
        (["run.bitwise.slices=2", "run.compile=blocks"], "run.compile"),
        (["run.runner=megatron_tp2_cp2", "run.bitwise={slices: 2, width: 2}"], "tensor_parallel x context_parallel"),
        (["run.runner=megatron_tp2_sp", "run.bitwise={slices: 2, width: 2}"], "sequence_parallel"),
        (["run.runner={name: megatron, pipeline_parallel: 2, pipeline_chunks: 2}"], "pipeline_chunks"),
        (["run.runner={name: megatron, data_parallel_style: zero1}"], "data_parallel_style"),
        (["run.runner=zero2_offload"], "offload_optimizer"),
        (["run.runner={name: fsdp, shard_size: 1}"], "shard_size"),
    ],
)
def test_what_cannot_be_bitwise_is_refused(workspace: Workspace, options: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=f"run.bitwise.*{part}"):
        batch_plan(load_config(workspace.project, [*COMMON, *options]), 2)


@pytest.mark.parametrize(
    ("runner", "plain", "ranks", "shards"),
    [
        ("ddp", "ddp", 2, 1),
        ("fsdp", "{name: fsdp, sync_each_micro_batch: true}", 2, 2),
        ("zero1", "zero2", 2, 2),
        ("zero2", "zero2", 3, 3),
    ],
)
def test_a_plan_counts_partial_sums_and_bytes(
    workspace: Workspace, runner: str, plain: str, ranks: int, shards: int
) -> None:
    """Of 12 micro batches, at most two partial sums are kept: 2 + 1 leaves, 4 + 2, or 8 + 1. `plain` sends as much."""

    def planned(*options: str) -> dict[str, Any]:
        return plan(workspace.project, [*COMMON, *options], world_size=ranks, presets=False).as_json()

    mine, theirs = planned(f"run.runner={runner}"), planned(f"run.runner={plain}", "run.bitwise=false")
    more, less = (found["memory"]["device"]["gradients"] for found in (mine, theirs))
    assert more - less == 2 * 4 * mine["parameters"]["trainable"] // shards
    sent = "bytes_sent_per_step_by_a_rank"
    assert mine["memory"][sent] == theirs["memory"][sent]


class Counted:
    """gloo that counts the bytes that a rank sends to others, in collectives of equal parts."""

    def __init__(self, inner: Any, sent: list[int]) -> None:
        self.inner, self.sent = inner, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def alltoall_base(self, out: torch.Tensor, given: torch.Tensor, *more: Any) -> Any:
        self.sent.append(given.nbytes * (self.inner.size() - 1) // self.inner.size())
        return self.inner.alltoall_base(out, given, *more)

    def _allgather_base(self, out: torch.Tensor, given: torch.Tensor) -> Any:
        self.sent.append(given.nbytes * (self.inner.size() - 1))
        return self.inner._allgather_base(out, given)


def _bytes_of_a_sum(count: int) -> tuple[int, int, float]:
    dist.init_process_group(f"cpu:{BACKENDS['cpu']}")
    group, sent = dist.distributed_c10d._get_default_group(), list[int]()
    backend: Any = group._get_backend(torch.device("cpu"))
    backend.inner = Counted(backend.inner, sent)
    given = torch.full((count,), float(dist.get_rank() + 1))
    dist.all_reduce(given)
    reduced = sum(sent)
    sent.clear()
    dist.reduce_scatter_tensor(torch.empty(count // dist.get_world_size()), given)
    scattered = sum(sent)
    dist.destroy_process_group()
    return reduced, scattered, given[0].item()


def test_a_sum_sends_as_many_bytes_as_a_ring() -> None:
    """A ring's all-reduce sends 2 (n - 1) / n times the data, and its reduce-scatter (n - 1) / n times."""
    assert run_ranks(4, _bytes_of_a_sum, 4096) == [(2 * 3 * 4096, 3 * 4096, 10.0)] * 4


def _sum_of_renamed_nccl() -> float:
    """A sum in a group for GPUs in which gloo stands for NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupNCCL", dist.ProcessGroupGloo)
        dist.init_process_group(f"cpu:{BACKENDS['cuda']}")
    given = torch.tensor([(1e8, 1.0, -1e8, 1.0)[dist.get_rank()]])
    dist.all_reduce(given)
    dist.destroy_process_group()
    return given.item()


def test_groups_for_gpus_sum_in_the_same_tree() -> None:
    assert dist.Backend.backend_capability[BACKENDS["cuda"]] == ["cuda"]
    assert run_ranks(4, _sum_of_renamed_nccl) == [tree([1e8, 1.0, -1e8, 1.0])] * 4


@pytest.mark.parametrize(("name", "expected"), [(name, "cpu:tree,cuda:tree_nccl") for name in ("ddp", "fsdp")])
def test_a_run_on_gpus_chooses_groups_and_deterministic_kernels(
    shared_workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    """Only the calls are tested; the machine needs no GPU."""
    config = load_config(shared_workspace.project, [f"run.runner={name}", "run.bitwise=true", "run.micro_batch_size=1"])
    runner = make_runner(config)
    chosen, deterministic = list[str](), list[bool]()
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("crosstrain.engine.runner.choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr("crosstrain.engine.runner.wait_for_ranks", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: chosen.append(backend))
    monkeypatch.setattr(torch, "use_deterministic_algorithms", deterministic.append)
    monkeypatch.setattr("crosstrain.engine.runner.watchdog.install", lambda *_, **__: None)
    runner.setup()
    assert chosen == [expected]
    assert deterministic == [True]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.undo()
    assert not torch.are_deterministic_algorithms_enabled()


def tree(leaves: list[float]) -> float:
    """Sum as the definition of the tree says: halves at the largest power of two, in fp32."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return (torch.tensor(tree(leaves[:half])) + torch.tensor(tree(leaves[half:]))).item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12, 24])
def test_sums_are_those_of_the_tree_on_any_number_of_ranks(ranks: int) -> None:
    rng = random.Random(0)
    leaves = [rng.uniform(-1, 1) * 10 ** rng.randint(-6, 3) for _ in range(24)]
    leaves = torch.tensor(leaves).tolist()  # fp32 numbers
    count = len(leaves) // ranks
    total = PartialSums()
    for rank in range(ranks):
        own = PartialSums()
        for leaf in range(rank * count, (rank + 1) * count):
            own.add((0, leaf), torch.tensor([leaves[leaf]]))
        assert [node for node, _ in own.nodes] == nodes_of(rank * count, count)
        for node, value in own.nodes:
            total.add(node, value)
    found = total.total()
    assert found is not None
    assert found.item() == tree(leaves)


@pytest.mark.parametrize("kind", ["normal", "wide", "tiny tail", "denormal", "huge", "one", "zero"])
def test_the_norm_is_that_of_fsum_for_every_order_and_cut(kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    x = {
        "normal": torch.randn(100_003, generator=g),
        "wide": torch.randn(100_003, generator=g) * 2.0 ** torch.randint(-40, 40, (100_003,), generator=g),
        "tiny tail": torch.cat([torch.full((1,), 3e4), torch.randn(100_000, generator=g) * 1e-4]),
        "denormal": torch.randn(10_000, generator=g) * 1e-42,
        "huge": torch.randn(10_000, generator=g) * 1e38,
        "one": torch.tensor([1.1]),
        "zero": torch.zeros(5),
    }[kind]
    found = exact_norm([x], Group())
    assert found == pytest.approx(math.sqrt(math.fsum((x.double() ** 2).tolist())), rel=1e-14)
    for _ in range(10):
        shuffled = x[torch.randperm(x.numel(), generator=g)]
        cut = int(torch.randint(0, x.numel() + 1, (), generator=g))
        assert exact_norm([shuffled[:cut], shuffled[cut:]], Group()) == found


def test_a_norm_that_is_not_finite_is_not_hidden() -> None:
    assert exact_norm([torch.tensor([1.0, math.inf])], Group()) == math.inf
    assert math.isnan(exact_norm([torch.tensor([1.0, math.nan])], Group()))
