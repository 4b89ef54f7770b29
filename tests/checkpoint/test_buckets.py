"""Runs in a bucket: whatever is killed or fails, no checkpoint is half, none is lost, and one process writes."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import crosstrain
import fixtures_ranks
from crosstrain.checkpoint import folders, writer
from crosstrain.checkpoint.boxes import Shard, whole_pieces
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.cli.main import main
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError, UserError
from fixtures_bucket import Bucket, kill_at, refuse, reset, slow
from fixtures_ranks import run_ranks

WRITTEN = Path(__file__).parent / "format_1"  # a project and its data
RUN = "s3://bucket/runs/mine"
SAVES = ("run.save_interval=2", "run.keep_last=2", "run.max_iters=4")


def _train(environment: dict[str, str], pid: str, options: tuple[str, ...]) -> None:
    """Train on this rank."""
    os.environ |= environment
    Path(pid).write_text(str(os.getpid()))
    writer.RENEWAL = 0.1
    os.chdir(WRITTEN)
    trainer = fixtures_ranks.make_trainer("project.yaml", options)
    trainer.fit()
    trainer.folder.close()
    trainer.runner.close()


class Machine:
    """A folder of its own for whatever a machine keeps."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self.environment = bucket.environment | {"XDG_CACHE_HOME": str(folder), "XDG_STATE_HOME": str(folder)}
        self.pid = folder / "pid"
        folder.mkdir()

    def train(self, *options: str, run: str = RUN, size: int = 1) -> None:
        options = (f"run.output_dir={run}", *SAVES, *options)
        run_ranks(size, _train, self.environment, str(self.pid), options)


@pytest.fixture
def machines(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Machines with nothing on their disks; this process has another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    monkeypatch.setattr(writer, "RENEWAL", 0.1)
    return (Machine(bucket, tmp_path / f"machine{number}") for number in range(1000))


def losses(run: str = RUN) -> list[tuple[int, float]]:
    rows = map(json.loads, storage.read(storage.join(run, "metrics.jsonl")).splitlines())
    return [(row["step"], row["loss"]) for row in rows]


def complete(run: str = RUN) -> list[int]:
    """The steps that are there to be resumed, after each was read whole."""
    root = storage.local(storage.join(run, "checkpoints"))
    for step in (steps := folders.steps(root)):
        reader = folders.verified(folders.step_folder(root, step))
        for (kind, name), stored in reader.tensors.items():
            value = torch.empty(stored.shape)
            reader.fill([Shard(kind, name, stored.shape, whole_pieces(value, stored.shape))])
    return steps


def sums(step: int, run: str = RUN) -> dict[str, str]:
    """The sums of a checkpoint's tensors' files."""
    manifest = json.loads(storage.read(storage.join(run, "checkpoints", f"step_{step:06d}", "manifest.json")))
    return {name: entry["xxh3"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.timeout(1800))])
@pytest.mark.slow
def test_whatever_put_is_the_last_no_checkpoint_is_half_and_none_is_lost(
    bucket: Bucket, machines: Iterator[Machine], every: bool
) -> None:
    whole = "s3://bucket/runs/whole"
    next(machines).train(run=whole)
    fewest = sum(method == "PUT" and ".writers" not in path for method, path in bucket.requests)  # without renewals
    expected, final = losses(whole), sums(4, whole)
    assert [step for step, _ in expected] == [1, 2, 3, 4]
    for number in count(1) if every else [18]:
        machine, run = next(machines), f"s3://bucket/runs/{number}"
        with bucket.interfered(kill_at(number, machine.pid, served=number % 2 == 0)):
            try:
                machine.train(run=run)
            except AssertionError as error:
                if "died" not in str(error):
                    raise
            else:  # it had ended before
                assert number > fewest
                break
        there = complete(run)
        (machine if number % 4 == 0 else next(machines)).train(run=run)  # also where the local folder is left
        log = storage.read(storage.join(run, "log.txt")).decode()
        assert not there or there[-1] == 4 or f"step_{there[-1]:06d} at step {there[-1]}" in log, number
        assert (losses(run), sums(4, run), complete(run)) == (expected, final, [2, 4]), number
        storage.remove(run)
    assert number >= 18


@pytest.mark.slow
def test_a_second_writer_is_refused_by_name(bucket: Bucket, machines: Iterator[Machine]) -> None:
    first = writer.Writer.claim(RUN, killed=None)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(writer.RENEWAL):
            first.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(AssertionError, match=rf"process {os.getpid()} of .+ on .+ is training in {RUN}"):
            next(machines).train()
        writer.check(RUN, first.id)
    finally:
        over.set()
        thread.join()
    next(machines).train()  # which finds that nobody renews the claim
    with pytest.raises(CheckpointError, match=f"has taken over {RUN}"):
        writer.check(RUN, first.id)


def test_one_of_several_that_find_a_killed_writer_wins(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RENEWAL", 0.05)
    killed = writer.Writer.claim(RUN, killed=None)
    found: list[str | UserError] = []

    def claim() -> None:
        try:
            found.append(writer.Writer.claim(RUN, killed=killed.id).id)
        except UserError as error:
            found.append(error)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [writer for writer in found if isinstance(writer, str)]
    assert len(won) == 1, found
    writer.check(RUN, won[0])


def test_a_server_on_which_two_could_write_is_refused(bucket: Bucket, machines: Iterator[Machine]) -> None:
    RunFolder(RUN).check()
    with (
        bucket.interfered(lambda environ: environ.pop("HTTP_IF_NONE_MATCH", None) and None),
        pytest.raises(UserError, match=rf"the server of {RUN} ignores the condition of a put \(If-None-Match\)"),
    ):
        RunFolder(RUN).check()
    assert storage.files(RUN) == {}


@pytest.mark.slow
def test_ranks_of_another_layout_go_on(bucket: Bucket, machines: Iterator[Machine]) -> None:
    next(machines).train("run.runner=fsdp", "run.max_iters=2", "run.lr_decay_iters=4", size=2)
    next(machines).train("run.runner=megatron_tp2", "run.lr_decay_iters=4", size=2)
    assert [step for step, _ in losses()] == [1, 2, 3, 4]
    assert complete() == [2, 4]


@pytest.mark.slow
def test_a_service_that_fails_now_and_then_changes_nothing(bucket: Bucket, machines: Iterator[Machine]) -> None:
    next(machines).train(run="s3://bucket/runs/whole")
    number, faults = [0], [refuse(1, "503 Slow Down", "SlowDown"), refuse(1, "500 Internal", "InternalError"), reset]

    def fail(environ: Any) -> Any:
        number[0] += 1
        slow(0.05)(environ)
        return faults[number[0] // 5 % 3](environ) if number[0] % 5 == 0 else None

    with bucket.interfered(fail):
        next(machines).train("run.max_iters=2", "run.lr_decay_iters=4")
        next(machines).train("run.lr_decay_iters=4")
    assert losses() == losses("s3://bucket/runs/whole")
    assert complete() == [2, 4]


@pytest.mark.slow
def test_expired_credentials_are_one_sentence_and_lose_nothing(bucket: Bucket, machines: Iterator[Machine]) -> None:
    machine, started = next(machines), [False]

    def expire(environ: Any) -> Any:
        started[0] |= "step_000004" in environ["PATH_INFO"] and environ["REQUEST_METHOD"] == "PUT"
        return ("400 Bad Request", "ExpiredToken") if started[0] else None

    with (
        bucket.interfered(expire),
        pytest.raises(AssertionError, match=r"CheckpointError: .*step_000004.* could not be written: .*have expired.*"),
    ):
        machine.train()
    assert complete() == [2]
    next(machines).train()
    assert complete() == [2, 4]


@pytest.mark.slow
def test_damage_in_the_bucket_is_found_when_it_is_read(bucket: Bucket, machines: Iterator[Machine]) -> None:
    next(machines).train()
    bucket.requests.clear()
    assert folders.steps(storage.local(storage.join(RUN, "checkpoints"))) == [2, 4]
    assert len(bucket.requests) == 1
    for file in ("state.json", "model.safetensors"):
        assert complete() == [2, 4]
        url = storage.join(RUN, "checkpoints", "step_000004", file)
        data = storage.read(url)
        storage.write(url, data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        assert complete() == [2, 4]  # from the copy on this machine, which is sound
        shutil.rmtree(storage.local(RUN))
        with pytest.raises(CheckpointError, match=f"{url}: contents do not match"):
            complete()
        storage.write(url, data[:-1])
        found, damaged = folders.newest_valid(storage.local(storage.join(RUN, "checkpoints")))
        assert found is not None
        assert (found.name, len(damaged)) == ("step_000002", 1)
        storage.write(url, data)


@pytest.mark.slow
def test_commands_take_urls(
    bucket: Bucket, machines: Iterator[Machine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next(machines).train()
    assert main(["export", "--checkpoint", f"{RUN}/checkpoints/latest", "--output", str(tmp_path / "out")]) == 0
    assert not list(storage.local(RUN).rglob("training-*")), "an export needs no optimizer state"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    with crosstrain.open(RUN) as model:
        for name, parameter in model.runner.model.weights.parameters().items():
            rows = weights.get(name, parameter)  # without the padding of the vocabulary
            assert rows.equal(parameter.detach()[: len(rows)]), name
    assert main(["report", RUN, "--output", str(tmp_path / "report.html")]) == 0
    for command, complaint in (
        (["export", "--checkpoint", RUN, "--output", "s3://bucket/exported"], "s3://bucket/exported is a URL"),
        (["report", "s3://bucket/none", "--output", str(tmp_path / "report.html")], "no metrics.jsonl found"),
        (["evaluate", "--checkpoint", "s3://bucket/none"], "s3://bucket/none: not a checkpoint, and contains none"),
        (
            [
                "train",
                "--cfg-path",
                str(WRITTEN / "project.yaml"),
                "--fresh",
                "--options",
                f"run.output_dir={RUN}",
                f"datasets.tiny.path={WRITTEN / 'tiny'}",
            ],
            "a folder in a bucket cannot be renamed",
        ),
        (
            [
                "train",
                "--cfg-path",
                str(WRITTEN / "project.yaml"),
                "--options",
                "run.output_dir=s3://no-bucket/run",
                f"datasets.tiny.path={WRITTEN / 'tiny'}",
            ],
            "s3://no-bucket/run cannot be written to",
        ),
    ):
        assert main(command) == 1
        assert complaint in capsys.readouterr().err
