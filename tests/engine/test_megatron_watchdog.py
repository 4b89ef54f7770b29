"""A rank of a megatron layout that leaves the common path is named within seconds."""

from __future__ import annotations

import re

import pytest

from conftest import Workspace
from fixtures_kill import plant, sentence

PLUGIN = '''
import torch
import torch.distributed as dist

from crosstrain.config.registry import registry

Megatron = registry.get("runner", "megatron")


@registry.register_runner("astray")
class Astray(Megatron):
    """Megatron, of which the last rank leaves the common path in the second step."""

    steps = 0

    def forward_backward(self, micro_batches, num_targets):
        self.steps += 1
        if self.steps == 2 and self.world.rank == self.world.size - 1:
            self.stray()
        return super().forward_backward(micro_batches, num_targets)


@registry.register_runner("meddling")
class Meddling(Astray):
    """It reduces what nobody else does, with the ranks that share its blocks."""

    def stray(self):
        dist.all_reduce(torch.zeros(7), group=self.tensor.group)  # meddling


@registry.register_runner("skipping")
class Skipping(Astray):
    """It leaves out what the first of its blocks exchanges."""

    def stray(self):
        self.spans[0][0].mlp.forward = lambda x: x


@registry.register_runner("finished")
class Finished(Astray):
    """It goes on to what comes after the step."""

    def stray(self):
        self.world.all_reduce_sum(1.0)  # finished
'''


@pytest.fixture
def astray(workspace: Workspace) -> Workspace:
    return plant(workspace, PLUGIN)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("how", "said_of"),
    [("meddling", "all_reduce of 7 float32"), ("skipping", None), ("finished", "all_reduce of 2 float64")],
)
def test_a_rank_that_leaves_the_path_is_named(astray: Workspace, how: str, said_of: str | None, stages: int) -> None:
    size = 2 * stages
    runner = f"run.runner={{name: {how}, tensor_parallel: 2, pipeline_parallel: {stages}}}"
    run = astray.train("out", "run.plugins=[elsewhere]", runner, nproc=size, fails=True)
    said = sentence(run)
    assert "never entered" in said
    assert f"rank {size - 1}" in said or f"ranks {size - 2}" in said
    if said_of is not None:
        assert said_of in said
    waited = re.search(r"for (\d+) s", said)
    assert waited is None or int(waited[1]) < 20
