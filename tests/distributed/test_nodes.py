"""Several machines: network namespaces joined by a cable are as good, for all that the program can tell."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import Run, kill, logged_step, wait_until
from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.launcher import launch
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.utils.errors import ConfigError, UserError
from fixtures_kill import assert_same_weights, dying, numbers, workers
from fixtures_nodes import ADDRESSES, OPTIONS, PORT, STEPS, Machines, finish
from fixtures_ranks import free_port, run_ranks


@pytest.fixture(scope="module")
def undisturbed(machines: Machines) -> Run:
    run = machines.train("undisturbed")
    assert run.column("step") == list(range(1, STEPS + 1))
    return run


def assert_undisturbed(run: Run, undisturbed: Run) -> None:
    assert numbers(run) == numbers(undisturbed)
    assert_same_weights(run.checkpoint(STEPS), undisturbed.checkpoint(STEPS))


def log_of(run: Run) -> str:
    return (run.folder / "log.txt").read_text()


@pytest.mark.slow
def test_two_nodes_train_as_two_workers_of_one(machines: Machines, undisturbed: Run) -> None:
    assert undisturbed.out.count("runner ddp on 2 cpu worker(s)") == 1, "one of them speaks"
    assert_undisturbed(machines.workspace.train("one_machine", *OPTIONS, nproc=2), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_node_is_replaced(machines: Machines, undisturbed: Run, lost: int) -> None:
    """Also node 0, which keeps the rendezvous."""
    name = f"lost{lost}"
    folder = machines.workspace.path / name
    nodes = [machines.start(node, name) for node in range(2)]
    wait_until(lambda: logged_step(folder) >= 10, nodes[0])
    kill(nodes[lost])
    died = logged_step(folder)
    assert died < STEPS, "it was over before the kill"
    time.sleep(3)
    assert nodes[1 - lost].poll() is None, "the other waits"
    replacement = machines.start(lost, name)
    for process in (replacement, nodes[1 - lost]):
        finish(process)
    run = Run(folder)
    assert_undisturbed(run, undisturbed)
    # 0: the other rank waited where nobody can see that a peer is lost, until the replacement came.
    assert len(re.findall(r"restarted \(restart [01] of 3\) and continue from step ", log_of(run))) == 1
    assert log_of(run).count("resuming") == 1


@pytest.mark.slow
def test_a_worker_that_dies_on_either_node_is_replaced(machines: Machines, undisturbed: Run, tmp_path: Path) -> None:
    run = machines.train("died", *dying(tmp_path, "10:1:kill", "11:0:kill"))
    assert_undisturbed(run, undisturbed)
    told = [line for line in log_of(run).splitlines() if "ranks restarted" in line]
    assert ["was killed by SIGKILL" in line for line in told] == [True, True], "the one that lost it says why"


@pytest.mark.slow
def test_a_users_mistake_ends_all_nodes(machines: Machines, tmp_path: Path) -> None:
    nodes = [machines.start(node, "mistaken", *dying(tmp_path, "3:1:user")) for node in range(2)]
    said = sorted(finish(node, code=1).strip().splitlines()[-1] for node in nodes)
    assert said == [
        "error: another node ended the run; see its output for the reason",
        "error: the moon is in the wrong phase; wait a week",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_node_that_is_to_leave_has_all_save(machines: Machines, number: signal.Signals) -> None:
    name = f"preempted{int(number)}"
    folder = machines.workspace.path / name
    nodes = [machines.start(node, name, "run.max_iters=1000000") for node in range(2)]
    wait_until(lambda: logged_step(folder) >= 5, nodes[0])
    nodes[1].send_signal(number)
    finish(nodes[1], code=128 + number)
    finish(nodes[0], code=128 + signal.SIGTERM)
    last = logged_step(folder)
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"step_{last:06d}"
    assert "ranks restarted" not in log_of(Run(folder))


@pytest.mark.slow
def test_the_survivor_goes_on_alone_where_it_may(machines: Machines, undisturbed: Run) -> None:
    folder = machines.workspace.path / "elastic"
    nodes = [machines.start(node, "elastic", nnodes="1:2") for node in range(2)]
    wait_until(lambda: logged_step(folder) >= 10, nodes[0])
    kill(nodes[1])
    finish(nodes[0])
    run = Run(folder)
    assert run.column("step") == list(range(1, STEPS + 1))
    assert run.column("samples") == undisturbed.column("samples")
    # Gradients are summed in another order; see test_equivalence for the size of that.
    assert run.column("loss") == pytest.approx(undisturbed.column("loss"), rel=1e-5)


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_found_out(machines: Machines) -> None:
    folder = machines.workspace.path / "apart"
    folder.mkdir()
    own = f"mount -t tmpfs none {folder}"  # in the namespace of mounts that `ip netns exec` makes
    nodes = [machines.start(0, "apart"), machines.start(1, "apart", before=own)]
    first, other = (finish(node, code=1) for node in nodes)
    assert f"run.output_dir: {folder} on {socket.gethostname()} is not the folder that rank 0 writes to" in first
    assert other.strip().splitlines()[-1] == "error: another node ended the run; see its output for the reason"
    assert "Traceback" not in first + other


@pytest.mark.slow
def test_nobody_comes(machines: Machines) -> None:
    alone = "run.max_restarts=0"
    first = machines.start(0, "nobody", alone, before="")
    *_, lonely = said = finish(first, code=1, seconds=240).strip().splitlines()
    assert said.count(f"waiting for 2 nodes to join at {ADDRESSES[0]}:{PORT}, for at most 120 s") == 1
    assert lonely.startswith(f"error: --nnodes: fewer than 2 nodes joined at {ADDRESSES[0]}:{PORT} within 120 s")


@pytest.mark.slow
def test_workers_are_no_orphans(machines: Machines) -> None:
    """Of a launcher that is killed alone, on one node: its workers save, and all leave."""
    folder = machines.workspace.path / "orphans"
    nodes = [machines.start(node, "orphans", "run.max_iters=1000000") for node in range(2)]
    wait_until(lambda: logged_step(folder) >= 5, nodes[0])
    orphans = workers(nodes[1].pid)
    os.kill(nodes[1].pid, signal.SIGKILL)
    nodes[1].wait()
    nodes[0].communicate(timeout=200)
    assert nodes[0].returncode == 128 + signal.SIGTERM, "as at a stop, and without waiting for another node"
    assert not any(Path(f"/proc/{pid}").exists() for pid in orphans)
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"step_{logged_step(folder):06d}"


# ---- what can be said without any node


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("two", 0, "127.0.0.1"), "--nnodes: 'two' is not a number of nodes"),
        (("3:2", 0, "127.0.0.1"), "--nnodes: '3:2' is not"),
        (("0", 0, "127.0.0.1"), "--nnodes: '0' is not"),
        (("2", 0, None), "needs --rdzv-endpoint HOST:PORT"),
        (("2", None, "127.0.0.1"), "needs --node-rank, 0 on one machine and 1 to 1"),
        (("2", 2, "127.0.0.1"), "--node-rank: must be from 0 to 1 with --nnodes 2, got 2"),
        (("2", 0, "127.0.0.1:http"), "--rdzv-endpoint: '127.0.0.1:http' is not HOST:PORT"),
        (("2", 0, "127.0.0.1:0"), "is not HOST:PORT"),
        (("2", 0, "127.0.0.1", "192.0.2.7"), "--local-addr: 192.0.2.7 is not an address of this machine"),
        (("2", 0, "192.0.2.7", "127.0.0.1"), "which other nodes cannot reach"),
        (("2", 0, "127.0.0.1", None, "patience=3"), "--rdzv-conf: 'patience' is unknown"),
        (("2", 0, "127.0.0.1", None, "join_timeout=x"), "--rdzv-conf: join_timeout needs a whole number"),
        (("2", 0, "no.such.host.invalid:1", None, "join_timeout=1"), "no.such.host.invalid cannot be reached"),
    ],
)
def test_flags_that_make_no_sense(flags: tuple, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Nodes.of(*(*flags, None, None)[:5])
    assert said in str(error.value)


def test_flags_that_do() -> None:
    assert Nodes.of(None, None, None, None) is None
    assert Nodes.of("1", 0, "localhost:6000", None) is None, "as scripts for any number of nodes say it"
    nodes = Nodes.of("1:3", 2, "127.0.0.1:6000", None, "join_timeout=600")
    assert nodes is not None
    assert (nodes.min_nodes, nodes.max_nodes, nodes.is_host, nodes.port) == (1, 3, False, 6000)
    assert (nodes.local_addr, nodes.interface) == ("127.0.0.1", "lo")
    assert nodes.rdzv_conf["join_timeout"] == 600
    six = Nodes.of("2", 0, "[::1]:6000", "::1")
    assert six is not None
    assert (six.host, six.port, six.local_addr) == ("::1", 6000, "::1")
    assert replace(nodes, local_addr="192.0.2.7").interface is None


def test_node_0_that_does_not_answer() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        nodes = Nodes.of("2", 1, f"127.0.0.1:{taken.getsockname()[1]}", None, "join_timeout=1")
        assert nodes is not None
        with pytest.raises(UserError, match=r"no answer from 127\.0\.0\.1:.*start node 0 there"):
            nodes.wait_for_host()


NODES = 64


def _meets(port: int, folder: Path) -> tuple[int, float]:
    """A node, which starts a worker that counts: the launcher's exit code and the seconds that it ran."""
    rank = int(os.environ.pop("RANK"))
    del os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]  # of a worker, and this is a launcher
    nodes = Nodes.of(f"{NODES - 1}:{NODES}", rank, f"127.0.0.1:{port}", "127.0.0.1", "last_call_timeout=20")
    began = time.monotonic()
    code = launch(_counts, (folder,), Launch(NODES, True, False, rank == 0, nodes, max_restarts=2, start_method="fork"))
    return code, time.monotonic() - began


def _counts(folder: Path) -> int:
    """A worker that meets the others; of the first start, the one with the highest rank then dies."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    start = len(list(folder.glob(f"*-{dist.get_rank()}")))
    (folder / f"{start}-{dist.get_rank()}").write_text(str(len({*ranks})))
    dist.barrier()
    if start == 0 and dist.get_rank() == NODES - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()
    return 0


@pytest.mark.slow
def test_many_nodes_meet_and_meet_again(tmp_path: Path) -> None:
    """Also after a worker has died on one of them."""
    port = free_port()
    ends = run_ranks(NODES, _meets, port, tmp_path, seconds=280)
    assert [code for code, _ in ends] == [0] * NODES
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{s}-{r}" for s in (0, 1) for r in range(NODES))
    assert {path.read_text() for path in tmp_path.iterdir()} == {str(NODES)}
    print(f"{NODES} nodes met twice in {max(seconds for _, seconds in ends):.0f} s")


def _sees(folders: list[str]) -> str:
    import torch.distributed as dist

    from crosstrain.checkpoint import run_folder
    from crosstrain.distributed.group import Group

    run_folder._PATIENCE = 1
    dist.init_process_group("gloo")
    try:
        run_folder.RunFolder(folders[dist.get_rank()]).check_shared(Group(dist.group.WORLD))
    except UserError as error:
        return str(error)
    return "shared"


@pytest.mark.slow
def test_a_run_folder_that_ranks_do_not_share(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert run_ranks(2, _sees, [str(one), str(one)]) == ["shared", "shared"]
    for said in run_ranks(2, _sees, [str(one), str(other)]):
        assert said.endswith("is not the folder that rank 0 writes to; put it on a file system that all nodes share")
        assert f"on {socket.gethostname()}" in said
    assert not list(one.iterdir()), "the check leaves nothing"
