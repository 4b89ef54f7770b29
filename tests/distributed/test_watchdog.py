"""Collectives that some ranks never enter end the run with one sentence; healthy runs are left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import timeit
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from conftest import ENVIRONMENT, Run, Workspace, session, wait_until
from crosstrain.distributed.watchdog.diagnosis import (
    DEADLOCKED,
    FORGIVEN,
    SETTLED,
    find_absent,
    find_deadlock,
    find_desync,
)
from crosstrain.distributed.watchdog.flight_recorder import (
    Call,
    FlightRecorder,
    History,
    Location,
    RankReport,
    Waiting,
)
from fixtures_kill import plant, sentence, workers
from fixtures_processes import train_as_user
from fixtures_ranks import free_port

PLUGIN = '''
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import all_reduce, broadcast
from torch.nn.parallel import DistributedDataParallel

from crosstrain.config.registry import registry
from crosstrain.engine.runner import Runner


@registry.register_runner("astray")
class Astray(Runner):
    """Breaks the rule that every rank calls a collective, in the way that is asked for."""

    @dataclass
    class Options:
        how: str = "healthy"

    steps = 0

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        self.module = DistributedDataParallel(model)
        self.module.register_comm_hook(None, lambda _, bucket: self.exchange(bucket))
        self.other = self.world.twin()

    def exchange(self, bucket):
        return all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    def forward_backward(self, micro_batches, num_targets):
        self.steps += 1
        how, rank = self.options.how, self.world.rank
        if how == "reduce" and rank == 0:
            torch.distributed.all_reduce(torch.zeros(7))  # reduce
        if how == "barrier" and rank == 0:
            dist.barrier()  # barrier
        if how == "group" and rank == 0:
            self.other.all_gather("is anybody there?")  # group
        if how == "late" and rank == 1:
            time.sleep(1000)  # late
        if how == "healthy":
            if rank == 0:
                broadcast(torch.zeros(3), 0)
            else:
                broadcast(torch.ones(3), 0)
            if self.steps == 4 and rank == 1:
                time.sleep(6)
        loss = super().forward_backward(micro_batches, num_targets)
        if how == "silent" and rank == 0 and self.steps == 2:
            all_reduce(torch.zeros(2, dtype=torch.float64))  # silent
        return loss
'''


@pytest.fixture
def astray(workspace: Workspace) -> Workspace:
    return plant(workspace, PLUGIN)


def options(how: str) -> list[str]:
    runner = f"run.runner={{name: astray, how: {how}}}"
    # Logged steps have an exchange of their own, of another size than the one that `silent` is taken for.
    interval = f"run.log_interval={50 if how == 'silent' else 1}"
    return ["run.plugins=[elsewhere]", runner, "run.global_batch_size=12", "run.micro_batch_size=2", interval]


def line(how: str) -> str:
    """The line of the plugin that is to blame."""
    number = next(i for i, text in enumerate(PLUGIN.splitlines(), 1) if text.endswith(f"# {how}"))
    return f"elsewhere/astray.py:{number} in forward_backward"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "workers", "expected"),
    [
        ("reduce", 2, "rank 1 never entered all_reduce of 7 float32, which rank 0 waited in for"),
        ("reduce", 3, "ranks 1 and 2 never entered all_reduce of 7 float32, which rank 0 waited in for"),
        ("barrier", 2, "rank 1 never entered barrier, which rank 0 waited in for"),
        ("silent", 2, "rank 1 never entered all_reduce of 2 float64, which rank 0 called"),
    ],
)
def test_a_call_that_some_rank_never_makes_is_named(astray: Workspace, how: str, workers: int, expected: str) -> None:
    said = sentence(train_as_user(astray, "out", *options(how), nproc=workers, fails=True))
    assert said.startswith(expected)
    assert f"({line(how)})" in said
    waited = re.search(r"for (\d+) s", said)
    assert waited is None or int(waited[1]) < 20


@pytest.mark.slow
def test_ranks_that_wait_in_two_groups_are_named_in_time(astray: Workspace) -> None:
    """Torch's own reductions are not recorded, so that only the time limit tells."""
    said = sentence(astray.train("out", *options("group"), "run.collective_timeout=8", nproc=2, fails=True))
    assert re.match(r"rank 1 never entered all_gather_object|rank 0 never entered all_reduce of ", said)
    assert line("group") in said


@pytest.mark.slow
def test_a_rank_that_does_not_come_in_time_is_named_with_its_place(astray: Workspace) -> None:
    said = sentence(astray.train("out", *options("late"), "run.collective_timeout=8", nproc=2, fails=True))
    assert said.startswith("rank 1 never entered all_reduce of ")
    assert f"rank 1 was at {line('late')}" in said


FREEZES = """
import os, signal

from crosstrain import Callback, registry

@registry.register_callback("freezes")
class Freezes(Callback):
    def before_step(self, batch):
        if self.trainer.runner.world.rank == 1 and self.trainer.state.step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
"""
# After a restart, rank 0 hosts the store through which the watchdogs meet; before, the launcher hosts it.
FREEZES_AGAIN = """
import os, signal

from crosstrain import Callback, registry

@registry.register_callback("freezes")
class Freezes(Callback):
    def before_step(self, batch):
        if self.trainer.runner.world.rank == 0 and self.trainer.state.step == 3:
            os.kill(os.getpid(), signal.SIGSTOP if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else signal.SIGKILL)
"""


def said_of_a_freeze(workspace: Workspace, callback: str, *options: str) -> str:
    """The error of a run of two workers, one of which is stopped by a callback."""
    plugin = workspace.path / "freezes.py"
    plugin.write_text(callback)
    frozen = f"run.plugins=[{plugin}]", "run.callbacks=[freezes]", "run.collective_timeout=8"
    return sentence(workspace.train("out", *frozen, *options, nproc=2, fails=True))


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["ddp", "fsdp"])
def test_a_process_that_is_stopped_is_named(workspace: Workspace, runner: str) -> None:
    said = said_of_a_freeze(workspace, FREEZES, f"run.runner={runner}")
    assert re.match(r"rank 1 (did not answer for|never entered .* which rank 0 waited in for) \d+ s", said)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["ddp", "fsdp"])
def test_a_stopped_process_that_hosts_the_store_does_not_hold_the_others_up(workspace: Workspace, runner: str) -> None:
    began = time.monotonic()
    said = said_of_a_freeze(workspace, FREEZES_AGAIN, f"run.runner={runner}", "run.max_restarts=1")
    assert re.match(r"the process that hosts the ranks' store \(rank 0, or its launcher\) did not answer for 8 s", said)
    assert time.monotonic() - began < 90


@pytest.mark.slow
def test_a_process_that_is_stopped_while_it_starts_does_not_hold_the_others_up(workspace: Workspace) -> None:
    process = workspace.start("out", "run.collective_timeout=1", nproc=2)
    wait_until(lambda: len(session(process)) >= 4, process)  # launcher, its tracker of resources, workers
    os.kill(workers(process.pid)[1], signal.SIGSTOP)
    said = process.communicate(timeout=200)[0].splitlines()[-1]
    assert process.returncode == 1
    assert said.startswith("error: the ranks did not all start within 61 s (run.collective_timeout plus one minute)")


@pytest.mark.slow
def test_workers_of_another_launcher_say_it_once(astray: Workspace) -> None:
    port = free_port()
    command = [part for part in astray.command(*options("barrier")) if part not in ("--nproc-per-node", "1")]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            command,
            cwd=astray.path,
            env=ENVIRONMENT | shared | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [1, 1]
    said = sentence(Run(astray.path, err="".join(errors), code=1))
    assert said.startswith("rank 1 never entered barrier")
    assert line("barrier") in said


@pytest.mark.slow
def test_a_healthy_run_is_not_disturbed(astray: Workspace) -> None:
    run = astray.train(
        "out",
        *options("healthy"),
        "run.max_iters=12",
        "run.eval_interval=4",
        "run.eval_iters=1",
        "run.save_interval=3",
        nproc=2,
    )
    assert run.column("step")[-1] == 12
    assert run.checkpoint(12).is_dir()
    assert "never entered" not in run.out + run.err


# ---- noting


@pytest.fixture
def recorder() -> Iterator[FlightRecorder]:
    """A recorder in this process, which is a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recorder = FlightRecorder(lambda: None)
    yield recorder
    recorder.close()
    dist.destroy_process_group()


def noted(recorder: FlightRecorder) -> list[str]:
    return [str(call) for history in recorder.histories(0, 10).values() for call in history.calls]


@pytest.mark.slow
def test_a_noted_call_costs_microseconds(recorder: FlightRecorder) -> None:
    tensor = torch.zeros(7)

    def cost() -> float:
        return min(timeit.repeat(lambda: dist.all_reduce(tensor), number=500, repeat=9)) / 500

    with_notes = cost()
    recorder.close()
    overhead = cost()
    assert with_notes - overhead < 20e-6, "about 2 are usual"


def test_outermost_calls_are_noted_whatever_name_they_go_by(recorder: FlightRecorder) -> None:
    gathered: list[str] = [""]
    dist.all_gather_object(gathered, "x")
    dist.distributed_c10d.all_reduce(torch.zeros(2, 3), async_op=True).wait()
    dist.broadcast(tensor=torch.zeros(5, dtype=torch.bfloat16), src=0, group=dist.group.WORLD)
    assert gathered == ["x"]
    assert noted(recorder) == ["all_gather_object", "all_reduce of 6 float32", "broadcast of 10 bytes"]
    (history,) = recorder.histories(0, 10).values()
    assert {call.location.file for call in history.calls} == {__file__}
    recorder.close()
    dist.barrier()
    assert not recorder.histories(0, 10)


def test_compiled_code_is_what_it_would_be(recorder: FlightRecorder) -> None:
    traced: list[str] = []

    def backend(module: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        traced.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    def reduced(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    def spread(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.broadcast(y, 0)
        return y + 1

    assert torch.compile(reduced, backend=backend, fullgraph=True)(torch.ones(2)).tolist() == [3, 3]
    assert "_c10d_functional.all_reduce" in traced
    assert torch.compile(spread, backend=backend)(torch.ones(2)).tolist() == [3, 3]
    assert noted(recorder) == ["broadcast of 8 bytes"]


# ---- judging

STEP = [
    Call("all_reduce", "2 float64", Location("trainer.py", 1, "f")),
    Call("all_reduce", "9 float32", Location("b", 2, "f")),
]
ODD = Call("all_reduce", "2 float64", Location("/plugin.py", 31, "g"))


def report(
    rank: int, calls: list[Call], waits: bool = True, ranks: int = 2, group: str = "0", idle: float = 9
) -> RankReport:
    history = History(list(range(ranks)), 0, calls)
    waiting = Waiting(group, len(calls) - 1, idle) if waits else None
    return RankReport(rank, 0, Location("elsewhere.py", 5, "h"), None, idle, False, waiting, {group: history})


def test_a_report_survives_its_journey() -> None:
    sent = report(1, [*STEP, ODD])
    assert RankReport.loads(sent.dumps()) == sent


def test_the_odd_call_is_found_from_what_follows() -> None:
    one, two = report(0, [*STEP, ODD, *STEP, STEP[0]]), report(1, [*STEP, *STEP, STEP[0], STEP[0]])
    for mine, other in ((one, two), (two, one)):
        said = find_desync(mine, [other])
        assert said is not None
        assert said.startswith("rank 1 never entered all_reduce of 2 float64, which rank 0 called")
        assert "/plugin.py:31 in g" in said


def test_ranks_that_branch_around_a_call_are_healthy() -> None:
    elsewhere_called = replace(ODD, location=Location("/plugin.py", 33, "g"))
    one, two = report(0, [ODD, *STEP, ODD]), report(1, [elsewhere_called, *STEP, elsewhere_called])
    assert find_desync(one, [two]) is None
    assert find_desync(one, [two], failed=True) is None


def test_ranks_that_move_are_not_judged_and_a_mismatch_long_ago_is_none() -> None:
    one, two = report(0, [*STEP, ODD], idle=SETTLED / 2), report(1, [*STEP, STEP[1]])
    assert find_desync(one, [two]) is None
    assert find_desync(replace(one, aborting=True), [two]) is not None
    rest = [STEP[0]] * FORGIVEN
    assert find_desync(report(0, [ODD, *rest]), [report(1, [STEP[1], *rest])]) is None


def test_unequal_sizes_at_one_line() -> None:
    one, two = report(0, [*STEP, ODD]), report(1, [*STEP, replace(ODD, size="3 float64")])
    said = find_desync(one, [two])
    assert said is not None
    assert "rank 0 entered all_reduce of 2 float64 and rank 1 all_reduce of 3 float64, both at /plugin.py:31" in said


def test_of_three_ranks_the_one_that_is_missing_is_named() -> None:
    odd = replace(ODD, size="7 float32")
    reports = [report(rank, [*STEP, *STEP, STEP[0] if rank == 1 else odd], ranks=3) for rank in range(3)]
    for mine in reports:
        said = find_desync(mine, [other for other in reports if other is not mine])
        assert said is not None
        assert said.startswith("rank 1 never entered all_reduce of 7 float32, which ranks 0 and 2 waited in")


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    one, two = report(0, [ODD], group="1"), report(1, [*STEP, STEP[0]])
    one.histories |= report(0, STEP).histories
    said = find_deadlock(two, [one])
    assert said is not None
    assert said.startswith(
        "rank 1 never entered all_reduce of 2 float64, which rank 0 waited in for 9 s (/plugin.py:31"
    )
    assert find_deadlock(two, [replace(one, idle_seconds=DEADLOCKED / 2)]) is None


def test_a_rank_that_waits_in_another_group_is_named_with_its_call() -> None:
    one, two = report(0, [ODD], group="1"), report(1, [*STEP, STEP[0]])
    one.histories |= report(0, STEP).histories
    said = find_absent(one, [two], silent=[])
    assert said is not None
    assert said.startswith(
        "rank 1 never entered all_reduce of 2 float64, which rank 0 waited in for 9 s (/plugin.py:31"
    )
    assert "rank 1 was in all_reduce of 2 float64 (trainer.py:1 in f)" in said


def test_absent_ranks_are_named_and_silent_ones() -> None:
    one, two = report(0, [*STEP, ODD], ranks=3), report(1, STEP, waits=False, ranks=3)
    said = find_absent(one, [two], silent=[2])
    assert said is not None
    assert said.startswith("ranks 1 and 2 never entered all_reduce of 2 float64")
    assert "rank 1 was at elsewhere.py:5 in h; rank 2 did not answer" in said
    assert find_absent(two, [one], silent=[]) is None
