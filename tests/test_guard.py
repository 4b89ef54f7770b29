"""Collectives that some ranks never enter end the run with one sentence; healthy runs are left alone."""

from __future__ import annotations

import re
import socket
import subprocess
import timeit
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from conftest import ENVIRONMENT, Run, Workspace
from crosstrain.distributed.watchdog.diagnosis import FAR, LOCKED, SETTLED, absence, deadlock, mismatch
from crosstrain.distributed.watchdog.flight_recorder import Recorder
from crosstrain.distributed.watchdog.rank_report import Call, History, Place, State, Waiting

PLUGIN = '''
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import all_reduce, broadcast
from torch.nn.parallel import DistributedDataParallel

from crosstrain.config.registry import registry
from crosstrain.engine.runner import Runner


@registry.register_runner("guarded")
class Guarded(Runner):
    """Breaks the rule that every rank calls a collective, in the way that is asked for."""

    @dataclass
    class Options:
        how: str = "healthy"

    steps = 0

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        self.module = DistributedDataParallel(model)
        self.other = self.new_group()

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
def guarded(workspace: Workspace) -> Workspace:
    folder = workspace.path / "elsewhere"
    folder.mkdir()
    (folder / "guarded.py").write_text(PLUGIN)
    return workspace


def options(how: str) -> list[str]:
    runner = f"run.runner={{name: guarded, how: {how}}}"
    # Logged steps have an exchange of their own, of another size than the one that `silent` is taken for.
    interval = f"run.log_interval={50 if how == 'silent' else 1}"
    return ["run.plugins=[elsewhere]", runner, "run.global_batch_size=12", "run.micro_batch_size=2", interval]


def line(how: str) -> str:
    """The line of the plugin that is to blame."""
    number = next(i for i, text in enumerate(PLUGIN.splitlines(), 1) if text.endswith(f"# {how}"))
    return f"elsewhere/guarded.py:{number} in forward_backward"


def sentence(run: Run) -> str:
    """The one sentence that a failed run ends with."""
    assert run.code == 1
    errors = [text for text in run.err.splitlines() if "error:" in text.lower() or "Traceback" in text]
    assert len(errors) == 1, run.err
    assert run.err.rstrip().splitlines()[-1] == errors[0]
    assert errors[0].startswith("error: ")
    return errors[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("how", "workers", "expected"),
    [
        ("reduce", 2, "rank 1 never entered all_reduce of 7 float32, which rank 0 waited in for"),
        pytest.param(
            "reduce",
            3,
            "ranks 1 and 2 never entered all_reduce of 7 float32, which rank 0 waited in for",
            marks=pytest.mark.slow,
        ),
        pytest.param("barrier", 2, "rank 1 never entered barrier, which rank 0 waited in for", marks=pytest.mark.slow),
        pytest.param(
            "group", 2, "rank 1 never entered all_gather_object, which rank 0 waited in for", marks=pytest.mark.slow
        ),
        pytest.param(
            "silent", 2, "rank 1 never entered all_reduce of 2 float64, which rank 0 called", marks=pytest.mark.slow
        ),
    ],
)
def test_a_call_that_some_rank_never_makes_is_named(guarded: Workspace, how: str, workers: int, expected: str) -> None:
    said = sentence(guarded.train("out", *options(how), nproc=workers, fails=True))
    assert said.startswith(expected)
    assert f"({line(how)})" in said
    waited = re.search(r"for (\d+) s", said)
    assert waited is None or int(waited[1]) < 20


@pytest.mark.slow
def test_a_rank_that_does_not_come_in_time_is_named_with_its_place(guarded: Workspace) -> None:
    said = sentence(guarded.train("out", *options("late"), "run.collective_timeout=8", nproc=2, fails=True))
    assert said.startswith("rank 1 never entered a collective which rank 0 waited in for")
    assert f"rank 1 was at {line('late')}" in said


@pytest.mark.slow
def test_workers_of_another_launcher_say_it_once(guarded: Workspace) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [part for part in guarded.command(*options("barrier")) if part not in ("--nproc-per-node", "1")]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            command, cwd=guarded.path, env=ENVIRONMENT | shared | {"RANK": str(rank)}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [1, 1]
    said = sentence(Run(guarded.path, err="".join(errors), code=1))
    assert said.startswith("rank 1 never entered barrier")
    assert line("barrier") in said


@pytest.mark.slow
def test_a_healthy_run_is_not_disturbed(guarded: Workspace) -> None:
    run = guarded.train(
        "out", *options("healthy"), "run.max_iters=12", "run.eval_interval=4", "run.eval_iters=1",
        "run.save_interval=3", nproc=2,
    )  # fmt: skip
    assert run.column("step")[-1] == 12
    assert run.checkpoint(12).is_dir()
    assert "never entered" not in run.out + run.err


# ---- noting


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A recorder in this process, which is a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recorder = Recorder(lambda: None)
    yield recorder
    recorder.close()
    dist.destroy_process_group()


def noted(recorder: Recorder) -> list[str]:
    return [str(call) for history in recorder.histories(0, 10).values() for call in history.calls]


@pytest.mark.slow
def test_a_noted_call_costs_microseconds(recorder: Recorder) -> None:
    tensor = torch.zeros(7)

    def cost() -> float:
        return min(timeit.repeat(lambda: dist.all_reduce(tensor), number=500, repeat=9)) / 500

    with_notes = cost()
    recorder.close()
    overhead = cost()
    assert with_notes - overhead < 20e-6, "about 2 are usual"


def test_outermost_calls_are_noted_whatever_name_they_go_by(recorder: Recorder) -> None:
    gathered: list[str] = [""]
    dist.all_gather_object(gathered, "x")
    dist.distributed_c10d.all_reduce(torch.zeros(2, 3), async_op=True).wait()
    dist.broadcast(tensor=torch.zeros(5, dtype=torch.bfloat16), src=0, group=dist.group.WORLD)
    assert gathered == ["x"]
    assert noted(recorder) == ["all_gather_object", "all_reduce of 6 float32", "broadcast of 10 bytes"]
    (history,) = recorder.histories(0, 10).values()
    assert {call.place.file for call in history.calls} == {__file__}
    recorder.close()
    dist.barrier()
    assert not recorder.histories(0, 10)


def test_backends_count_what_is_not_noted_unless_two_ranks_talk_alone(recorder: Recorder) -> None:
    dist.all_reduce(torch.zeros(1))
    (history,) = recorder.histories(0, 10).values()
    assert history.begun == history.positions[0] + 1
    with pytest.raises(RuntimeError):
        dist.group.WORLD.send([torch.zeros(1)], 0, 0)
    (history,) = recorder.histories(0, 10).values()
    assert history.begun is None


def test_compiled_code_is_what_it_would_be(recorder: Recorder) -> None:
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
    Call("all_reduce", "2 float64", Place("trainer.py", 1, "f")),
    Call("all_reduce", "9 float32", Place("b", 2, "f")),
]
ODD = Call("all_reduce", "2 float64", Place("/plugin.py", 31, "g"))


def state(
    rank: int, calls: list[Call], waits: bool = True, ranks: int = 2, group: str = "0", still: float = 9
) -> State:
    history = History(list(range(ranks)), 0, calls, list(range(len(calls))), len(calls))
    waiting = Waiting(group, len(calls) - 1, still) if waits else None
    return State(rank, 0, Place("elsewhere.py", 5, "h"), None, still, False, waiting, {group: history})


def test_a_state_survives_its_journey() -> None:
    sent = state(1, [*STEP, ODD])
    assert State.loads(sent.dumps()) == sent


def test_the_odd_call_is_found_from_what_follows() -> None:
    one, two = state(0, [*STEP, ODD, *STEP, STEP[0]]), state(1, [*STEP, *STEP, STEP[0], STEP[0]])
    for mine, other in ((one, two), (two, one)):
        said = mismatch(mine, [other])
        assert said is not None
        assert said.startswith("rank 1 never entered all_reduce of 2 float64, which rank 0 called")
        assert "/plugin.py:31 in g" in said


def test_ranks_that_branch_around_a_call_are_healthy() -> None:
    elsewhere_called = replace(ODD, place=Place("/plugin.py", 33, "g"))
    one, two = state(0, [ODD, *STEP, ODD]), state(1, [elsewhere_called, *STEP, elsewhere_called])
    assert mismatch(one, [two]) is None
    assert mismatch(one, [two], failed=True) is None


def test_ranks_that_move_are_not_judged_and_a_mismatch_long_ago_is_none() -> None:
    one, two = state(0, [*STEP, ODD], still=SETTLED / 2), state(1, [*STEP, STEP[1]])
    assert mismatch(one, [two]) is None
    assert mismatch(replace(one, aborting=True), [two]) is not None
    rest = [STEP[0]] * FAR
    assert mismatch(state(0, [ODD, *rest]), [state(1, [STEP[1], *rest])]) is None


def test_unequal_sizes_at_one_line() -> None:
    one, two = state(0, [*STEP, ODD]), state(1, [*STEP, replace(ODD, size="3 float64")])
    said = mismatch(one, [two])
    assert said is not None
    assert "rank 0 entered all_reduce of 2 float64 and rank 1 all_reduce of 3 float64, both at /plugin.py:31" in said


def test_of_three_ranks_the_one_that_is_missing_is_named() -> None:
    odd = replace(ODD, size="7 float32")
    states = [state(rank, [*STEP, *STEP, STEP[0] if rank == 1 else odd], ranks=3) for rank in range(3)]
    for mine in states:
        said = mismatch(mine, [other for other in states if other is not mine])
        assert said is not None
        assert said.startswith("rank 1 never entered all_reduce of 7 float32, which ranks 0 and 2 waited in")


def test_a_call_that_meets_one_which_is_not_noted() -> None:
    one, two = state(0, [*STEP, ODD]), state(1, STEP, waits=False)
    assert deadlock(one, [two]) is None  # it may yet come
    two.histories["0"].begun = 3
    said = deadlock(two, [one])
    assert said is not None
    assert said.startswith("rank 1 never entered all_reduce of 2 float64")
    assert deadlock(one, [replace(two, still=LOCKED / 2)]) is None
    two.histories["0"].begun = None
    assert deadlock(one, [two]) is None
    two.histories["0"].begun, two.histories["0"].positions = 4, [1, 2]  # counts that never agreed
    assert deadlock(one, [two]) is None


@pytest.mark.parametrize("is_noted", [True, False])
def test_ranks_that_wait_for_each_other_in_two_groups(is_noted: bool) -> None:
    one, two = state(0, [ODD], group="1"), state(1, [*STEP, STEP[0]] if is_noted else STEP, waits=is_noted)
    one.histories |= state(0, STEP).histories
    assert is_noted or deadlock(one, [two]) is None
    two.histories["0"].begun = 3
    said = deadlock(two, [one])
    assert said is not None
    assert said.startswith(
        "rank 1 never entered all_reduce of 2 float64, which rank 0 waited in for 9 s (/plugin.py:31"
    )
    assert deadlock(two, [replace(one, still=LOCKED / 2)]) is None


def test_absent_ranks_are_named_and_silent_ones() -> None:
    one, two = state(0, [*STEP, ODD], ranks=3), state(1, STEP, waits=False, ranks=3)
    said = absence(one, [two], silent=[2])
    assert said is not None
    assert said.startswith("ranks 1 and 2 never entered all_reduce of 2 float64")
    assert "rank 1 was at elsewhere.py:5 in h; rank 2 did not answer" in said
    assert absence(two, [one], silent=[]) is None


def test_a_rank_that_is_absent_from_what_is_not_noted() -> None:
    one, two = state(0, STEP, waits=False), state(1, STEP, waits=False)
    assert absence(one, [two], silent=[]) is None
    one.histories["0"].begun = 3
    said = absence(one, [two], silent=[])
    assert said is not None
    assert said.startswith("rank 1 never entered a collective which rank 0 waited in for 9 s (elsewhere.py:5 in h)")
    assert absence(two, [one], silent=[]) is None
