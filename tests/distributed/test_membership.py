"""Ranks that wait for another rank than the lost one."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from crosstrain.distributed.launch import membership
from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.launcher import environment
from crosstrain.distributed.launch.local_workers import LocalWorkers
from crosstrain.distributed.launch.members import Members

RANKS = 3
SILENCE = 3.0  # seconds in which nothing may happen


def work(folder: Path, apart: bool) -> int:
    """Rank 0 waits for rank 1, which is busy, when rank 2 is killed."""
    member = membership.current
    assert member is not None
    epoch = member.enter(None, apart)
    dist.init_process_group("gloo", rank=epoch.rank, world_size=epoch.size)
    noticed = folder / "rank_0_has_noticed"
    if epoch.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    elif epoch.rank == 1:
        deadline = time.monotonic() + (SILENCE if apart else 30)
        while time.monotonic() < deadline and not noticed.exists():
            time.sleep(0.05)
        (folder / "before_rank_1").write_text(str(noticed.exists()))
    else:
        with suppress(RuntimeError):
            dist.recv(torch.zeros(1), src=1)
        noticed.touch()
    dist.destroy_process_group()
    return 0 if member.enter(None, apart).size == RANKS - 1 else 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_loss_ends_a_wait_for_a_rank_that_goes_on(tmp_path: Path, apart: bool) -> None:
    """Ranks that take steps apart finish their step; all others leave theirs at once."""
    how = Launch(RANKS, True, False, True)
    with environment(how):
        code = Members(LocalWorkers(work, (tmp_path, apart), how, True), how, [], range(1, RANKS + 1), 60).exit_code()
    assert code == 0
    assert (tmp_path / "before_rank_1").read_text() == str(not apart)
