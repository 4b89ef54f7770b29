"""A runner from a folder outside the repository, written from docs/writing-a-runner.md alone.

It exchanges gradients itself (bucketed reduce-scatter) and shards the optimizer over the ranks, as ZeRO-1 does.
"""

from __future__ import annotations

import shutil

import pytest

from conftest import ROOT, Run, Workspace
from crosstrain.checkpoint.files import Reader
from fixtures_ranks import mostly_slow, train

TOLERANCE = 1e-6  # as in test_equivalence: only the order of fp32 sums differs
SCHEDULE = ("run.lr_decay_iters=20", "run.warmup_steps=2", "run.grad_norm_clip=0.5")


@pytest.fixture(scope="module")
def sharded(shared_workspace: Workspace) -> tuple[str, ...]:
    folder = shared_workspace.path / "elsewhere"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "third_party" / "zero1_lite.py", folder)
    return (f"run.plugins=[{folder}]", "run.runner={name: zero1_lite, bucket_mb: 0.05}")


@pytest.fixture(scope="module")
def reference(shared_workspace: Workspace) -> Run:
    return train(shared_workspace.project, "reference", *SCHEDULE, size=2)


def test_it_trains_like_ddp_and_shards_the_optimizer(
    shared_workspace: Workspace, sharded: tuple[str, ...], reference: Run
) -> None:
    run = train(shared_workspace.project, "sharded", *SCHEDULE, *sharded, size=2)
    assert run.column("loss") == pytest.approx(reference.column("loss"), rel=TOLERANCE)
    assert run.column("grad_norm") == pytest.approx(reference.column("grad_norm"), rel=TOLERANCE)

    moments = Reader.open(run.checkpoint(20))
    written_by = {name: moments.tensors["exp_avg", name].boxes[0].file for name in moments.names("exp_avg")}
    assert set(written_by.values()) == {"training-00000.safetensors", "training-00001.safetensors"}
    assert moments.names("exp_avg") == moments.names("param")


@pytest.mark.parametrize("order", mostly_slow(["sharded then ddp", "ddp then sharded"], []))
def test_it_resumes_ddp_and_is_resumed_by_it(
    shared_workspace: Workspace, sharded: tuple[str, ...], reference: Run, order: str
) -> None:
    name = order.replace(" ", "_")
    first, second = (sharded, ()) if order.startswith("sharded") else ((), sharded)
    train(shared_workspace.project, name, *SCHEDULE, *first, "run.max_iters=10", size=2)
    resumed = train(shared_workspace.project, name, *SCHEDULE, *second, size=2)
    assert resumed.column("samples") == reference.column("samples")
    assert resumed.column("loss") == pytest.approx(reference.column("loss"), rel=TOLERANCE)
