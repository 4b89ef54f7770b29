"""A damaged checkpoint in a bucket is passed over as on a disk, and a damaged claim takes nobody's place."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import boto3
import pytest
import torch.distributed as dist
import yaml
from crosstrain_plugins.builtin.commands.report.read_run import read_runs
from test_damage import NEWER, OLDER, is_as_written, shards, state

from crosstrain.checkpoint import folders, writer
from crosstrain.checkpoint.checkpointer import Checkpointer, load_state
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.manifest import manifest_text
from crosstrain.checkpoint.run_folder import bring
from crosstrain.cli.main import main
from crosstrain.distributed.group import Group
from crosstrain.training.state import starting_point
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError, StorageError, UserError
from fixtures_bucket import Bucket, refuse
from fixtures_ranks import mostly_slow, run_ranks

RUN = "s3://bucket/runs/mine"
TENSORS = ("model.safetensors", "training-00000.safetensors")
FILES = ("manifest.json", "state.json", "config.json", "tokenizer.json", *TENSORS)


@pytest.fixture
def root(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The local folder of a run's checkpoints in a bucket; nothing of them is on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "writer"))

    def assets(folder: Path, reader: Reader) -> None:
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        (folder / "tokenizer.json").write_text("{}")
        for name in reader.names("param"):
            reader.whole(name)

    root = storage.local(f"{RUN}/checkpoints")
    keeper = Checkpointer(root, Group(), assets)
    for step in (OLDER, NEWER):
        keeper.save(step, shards(step, cut=False), asdict(state(step)), background=False)
    keeper.wait()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "reader"))
    return storage.local(f"{RUN}/checkpoints")


def at(step: int, file: str) -> str:
    return f"{RUN}/checkpoints/step_{step:06d}/{file}"


def test_the_state_is_read_before_any_tensor_is_fetched(root: Path) -> None:
    folder = folders.step_folder(root, NEWER)
    assert not folder.exists()
    folders.verified(folder, whole=False)
    assert load_state(folder) == {**asdict(state(NEWER)), "step": NEWER}
    assert not [*folder.glob("*.safetensors")]


# ---- kinds of damage: each gets random numbers, the object and its contents


def _cut(rng: random.Random, url: str, data: bytes) -> None:
    storage.write(url, data[: rng.randrange(1, len(data))])


def _emptied(rng: random.Random, url: str, data: bytes) -> None:
    storage.write(url, b"")


def _longer(rng: random.Random, url: str, data: bytes) -> None:
    storage.write(url, data + rng.randbytes(rng.choice([1, 4096])))


def _bit(rng: random.Random, url: str, data: bytes) -> None:
    place = rng.randrange(len(data))
    storage.write(url, data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])


def _zeroed(rng: random.Random, url: str, data: bytes) -> None:
    storage.write(url, bytes(len(data)))


def _noise(rng: random.Random, url: str, data: bytes) -> None:
    storage.write(url, rng.randbytes(len(data)))


def _removed(rng: random.Random, url: str, data: bytes) -> None:
    storage.remove(url)


def _of_the_older(rng: random.Random, url: str, data: bytes) -> None:
    storage.write(url, storage.read(url.replace(f"step_{NEWER:06d}", f"step_{OLDER:06d}")))


def _of_a_neighbour(rng: random.Random, url: str, data: bytes) -> None:
    folder, name = url.rsplit("/", 1)
    storage.write(url, storage.read(storage.join(folder, rng.choice([other for other in FILES if other != name]))))


def _a_folder(rng: random.Random, url: str, data: bytes) -> None:
    storage.remove(url)
    storage.write(f"{url}/inside", data)


def _garbage(rng: random.Random, url: str, data: bytes) -> None:
    storage.write(url, rng.choice([b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 10**5, b'{"step": NaN}']))


KINDS = (_cut, _emptied, _longer, _bit, _zeroed, _noise, _removed, _of_the_older, _of_a_neighbour, _a_folder, _garbage)
HARM = [(kind, file) for kind in KINDS for file in FILES]  # 66, one of which is none: the assets of both are equal
QUICK = [
    (_emptied, "manifest.json"), (_of_the_older, "model.safetensors"), (_bit, "training-00000.safetensors"),
    (_cut, "state.json"), (_removed, "model.safetensors"), (_a_folder, "config.json"),
]  # fmt: skip


@pytest.mark.parametrize("every", mostly_slow([False, True], [False]))
def test_each_kind_of_damage_is_passed_over(root: Path, every: bool, caplog: pytest.LogCaptureFixture) -> None:
    passed = 0
    for number, (kind, file) in enumerate(HARM if every else QUICK):
        data = storage.read(at(NEWER, file))
        kind(random.Random(number), at(NEWER, file), data)
        caplog.clear()
        shutil.rmtree(root.parent, ignore_errors=True)  # this machine's copies, which are sound
        is_there = storage.listing(f"{RUN}/checkpoints/step_{NEWER:06d}").get(file) is not None
        left = storage.read_end(at(NEWER, file), 1 << 20) if is_there else None
        harmed, gone = left != data, left is None and file == "manifest.json"
        start = starting_point(root, None, Group())
        assert start is not None
        assert is_as_written(start, OLDER if harmed else NEWER), (kind, file)
        said = [r.getMessage() for r in caplog.records if "skipping a damaged checkpoint" in r.getMessage()]
        assert len(said) == (harmed and not gone), (kind, file)  # without a manifest there is no checkpoint
        # A manifest of the older one is sound, and the files beside it are not as it says.
        named = f"step_{NEWER:06d}/{'' if file == 'manifest.json' else file}"
        assert all(named in line and "\n" not in line for line in said), (kind, file, said)
        passed += harmed
        storage.remove(at(NEWER, file))
        storage.write(at(NEWER, file), data)
    assert passed >= (60 if every else 6)
    start = starting_point(root, None, Group())
    assert start is not None
    assert is_as_written(start, NEWER)


@pytest.mark.parametrize(("file", "passed"), [("model.safetensors", True), ("training-00000.safetensors", False)])
def test_a_reader_of_weights_checks_the_weights(root: Path, file: str, passed: bool) -> None:
    data = storage.read(at(NEWER, file))
    storage.write(at(NEWER, file), data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    assert folders.find_checkpoint(RUN).name == f"step_{OLDER if passed else NEWER:06d}"
    assert not list(root.rglob("training-*")), "an evaluation needs no optimizer state"


def _start(environment: dict[str, str], url: str, cache: str) -> str | None:
    os.environ |= environment | {"XDG_CACHE_HOME": f"{cache}{os.environ['RANK']}", "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo")
    found = starting_point(storage.local(url), None, Group(dist.group.WORLD))
    dist.destroy_process_group()
    return found.name if found is not None and found.is_dir() else None


@pytest.mark.slow
def test_ranks_on_two_machines_pass_it_over_together(root: Path, bucket: Bucket, tmp_path: Path) -> None:
    url = at(NEWER, "training-00000.safetensors")  # which one of the ranks checks
    storage.write(url, storage.read(url)[::-1])
    found = run_ranks(2, _start, bucket.environment, f"{RUN}/checkpoints", str(tmp_path / "rank"))
    assert found == [f"step_{OLDER:06d}"] * 2


def test_a_bucket_that_fails_is_no_damage(root: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_ATTEMPTS", 1)
    busy = refuse(1000, "503 Slow Down", "SlowDown")
    with (
        bucket.interfered(lambda environ: busy(environ) if "model.saf" in environ["PATH_INFO"] else None),
        pytest.raises(StorageError, match=r"model\.safetensors: failed after"),
    ):
        starting_point(root, None, Group())


def test_a_later_release_is_not_passed_over(root: Path) -> None:
    manifest = json.loads(storage.read(at(NEWER, "manifest.json")))
    del manifest["sha256"]
    storage.write(at(NEWER, "manifest.json"), manifest_text(manifest | {"version": 4}))
    with pytest.raises(CheckpointError, match=r"this release cannot read format .* version 4"):
        starting_point(root, None, Group())


def test_an_empty_pointer_is_none(root: Path) -> None:
    storage.write(f"{RUN}/checkpoints/latest", b"")
    assert folders.read_pointer(root, "latest") is None
    assert folders.find_checkpoint(RUN).name == f"step_{NEWER:06d}"


# ---- the claim of a writer


def _content(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    def changed(text: bytes) -> bytes:
        claim = json.loads(text)
        change(claim)
        return json.dumps(claim).encode()

    return changed


DAMAGED = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2],
    "an empty object": lambda text: b"{}",
    "no object": lambda text: b"[1]",
    "noise": lambda text: bytes(range(256)),
    "deep": lambda text: b"[" * 50_000,
    "no id": _content(lambda claim: claim.pop("id")),
    "ended as a word": _content(lambda claim: claim.update(ended="yes")),
    "of an earlier writer": _content(lambda claim: claim.update(number=1, ended=True, id="a" * 32)),
    "a short lease": _content(lambda claim: claim.update(renewal=0)),
    "an endless lease": _content(lambda claim: claim.update(renewal=1e300)),
    "no lease": _content(lambda claim: claim.update(renewal="soon")),
}


@pytest.mark.parametrize("kind", mostly_slow(DAMAGED, ["empty", "of an earlier writer", "a short lease"]))
@pytest.mark.parametrize("alive", [True, False])
def test_a_damaged_claim_is_waited_for_and_then_taken(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, kind: str, alive: bool
) -> None:
    monkeypatch.setattr(writer, "RENEWAL", 0.2)
    writer.Writer.claim(RUN, killed=None).renew(ended=True)
    first = writer.Writer.claim(RUN, killed=None)
    assert first.number == 2
    url = f"{RUN}/.writers/000002"
    storage.write(url, DAMAGED[kind](storage.read(url)))
    if alive:
        threading.Timer(0.3, first.renew).start()
        with pytest.raises(UserError, match=r"process \d+ of .+ on .+ is training in"):
            writer.Writer.claim(RUN, killed=None)
        writer.check(RUN, first.id)
    else:
        second = writer.Writer.claim(RUN, killed=None)
        assert second.number == 3
        with pytest.raises(CheckpointError, match="has taken over"):
            writer.check(RUN, first.id)


def test_a_claim_that_is_damaged_during_a_save_is_no_others(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RENEWAL", 0.2)
    mine = writer.Writer.claim(RUN, killed=None)
    for harm in (lambda url: storage.write(url, b""), storage.remove):
        harm(f"{RUN}/.writers/000001")
        threading.Timer(0.2, mine.renew).start()
        writer.check(RUN, mine.id)


@pytest.mark.parametrize("name", ["7", "٣٣٣٣٣٣", "abc", "-00001", "000009/inside", "9" * 40])
def test_other_objects_beside_the_claims_lock_nobody_out(bucket: Bucket, name: str) -> None:
    storage.write(f"{RUN}/.writers/{name}", b"{}")
    assert writer.Writer.claim(RUN, killed=None).number == 1


# ---- a run's other files


def test_names_that_no_disk_can_have_are_left_out_and_named(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("metrics.jsonl", "log.txt", "tensorboard/a", "tensorboard/a/b", "x" * 400, "profile/y\0z"):
        storage.write(f"{RUN}/{name}", name.encode())
    for name in ("checkpoints/x", ".writers/1", ".lock", ".writer"):
        storage.write(f"{RUN}/{name}", b"not brought")
    bring(RUN, tmp_path)
    boto3.client("s3").delete_object(Bucket="bucket", Key="runs/mine/profile/y\0z")  # XML, for many at once, has no NUL
    there = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert {"metrics.jsonl", "log.txt"} <= there
    assert there <= {"metrics.jsonl", "log.txt", "tensorboard/a", "tensorboard/a/b"}
    (said,) = [r.getMessage() for r in caplog.records]
    assert "3 object(s) are not copied, because their names are not valid file names here" in said


def test_a_report_downloads_only_what_it_reads(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = "".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 4))
    log = "early\n" + "x" * 1_000_000 + "\nlate\n"
    small = {"metrics.jsonl": rows, "config.yaml": yaml.safe_dump({"run": {"seed": 1}}), "log.txt": log}
    for name, text in small.items():
        storage.write(f"{RUN}/{name}", text.encode())
    for name in ("profile/trace.json", "export/model.safetensors", "tensorboard/events"):
        storage.write(f"{RUN}/{name}", bytes(1 << 20))
    bucket.sent.clear()
    (run,) = read_runs([RUN])
    assert (list(run.curves["loss"].values()), run.config["run.seed"]) == ([1.0, 1 / 2, 1 / 3], "1")
    assert run.log_end.endswith("late")
    assert sum(bucket.sent.values()) < 100_000
    storage.write(f"{RUN}/config.yaml", b"")
    storage.write(f"{RUN}/log.txt", b"")
    assert read_runs([RUN])[0].log_end == ""
    assert main(["report", RUN, "--output", str(tmp_path / "page.html")]) == 0
