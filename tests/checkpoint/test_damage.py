"""Damage to a checkpoint is noticed before anything of it is used, and the checkpoint before it takes its place."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import Workspace
from crosstrain.checkpoint import folders
from crosstrain.checkpoint.boxes import Shard, flat_range_pieces, whole_pieces
from crosstrain.checkpoint.checkpointer import Checkpointer
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.load_weights import load_shards
from crosstrain.checkpoint.manifest import IncompatibleCheckpointError, manifest_text
from crosstrain.cli.main import main
from crosstrain.distributed.group import Group
from crosstrain.training.state import State, starting_point
from crosstrain.utils.errors import CheckpointError
from fixtures_ranks import mostly_slow, run_ranks
from fixtures_tampering import seal

SHAPES = {"h.0.weight": (6, 4), "h.1.weight": (6, 4), "h.2.weight": (6, 4), "bias": (3,)}
OLDER, NEWER = 5, 6


def shards(seed: int, cut: bool) -> list[Shard]:
    """Parameters and moments of random numbers; `cut` in pieces, as ranks that share a tensor hold them."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for kind in ("param", "exp_avg"):
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=draw)
            flat, half = values.flatten(), values.numel() // 2
            pieces = flat_range_pieces(flat[:half], shape, 0) + flat_range_pieces(flat[half:], shape, half)
            made.append(Shard(kind, name, shape, pieces if cut else whole_pieces(values, shape)))
    return made


def state(step: int) -> State:
    return State(step=step, samples=8 * step, applied_steps=step, best_loss=2.5, recent_losses=[3.0, 2.5])


def write(root: Path, cut: bool) -> Path:
    """A run's folder of two checkpoints, which differ in every tensor."""

    def assets(folder: Path, _: object) -> None:
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        (folder / "tokenizer.json").write_text("{}")

    keeper = Checkpointer(root / "checkpoints", Group(), assets)
    for step in (OLDER, NEWER):
        keeper.save(step, shards(step, cut), asdict(state(step)), background=False)
    keeper.wait()
    return root


@pytest.fixture(params=["whole", "cut"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "run", request.param == "cut")


def opened(checkpoint: Path) -> tuple[State, dict[tuple[str, str], Tensor]]:
    values = {(kind, name): torch.zeros(shape) for kind in ("param", "exp_avg") for name, shape in SHAPES.items()}
    load_shards(Reader.open(checkpoint), [Shard(*key, v.shape, whole_pieces(v, v.shape)) for key, v in values.items()])
    return State.load(checkpoint), values


def is_as_written(checkpoint: Path, step: int) -> bool:
    saved, values = opened(checkpoint)
    truth = {(s.kind, s.name): s.pieces[0].data for s in shards(step, cut=False)}
    return saved == state(step) and all(torch.equal(values[key], truth[key]) for key in truth)


def newest(run: Path) -> Path:
    return folders.step_folder(run / "checkpoints", NEWER)


def check_fallback(run: Path, victim: Path) -> None:
    """The older checkpoint takes the place of the newer one, of which `victim` is named."""
    found, complaints = folders.newest_valid(run / "checkpoints")
    assert found == folders.step_folder(run / "checkpoints", OLDER), victim
    assert len(complaints) == 1
    assert str(victim) in complaints[0]


# ------------------------------------------------------------------------------------------------------------ one bit


def bits(path: Path) -> list[tuple[Path, int]]:
    return [(path, bit) for bit in range(8 * path.stat().st_size)]


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@pytest.mark.parametrize("bits_of", mostly_slow({"a sample": 1, "all": 2}, ["a sample"]))
def test_a_flipped_bit_is_noticed_wherever_it_is(run: Path, bits_of: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    rng = random.Random(7)
    folder = newest(run)
    documents = bits(folder / "manifest.json") + bits(folder / "state.json")
    others = [bit for path in folder.iterdir() if path.suffix != ".json" or "s" not in path.stem for bit in bits(path)]
    chosen = documents if bits_of == "all" else rng.sample(documents, 150)
    for path, bit in chosen + rng.sample(others, 2000 if bits_of == "all" else 50):
        flip(path, bit)
        check_fallback(run, path)
        flip(path, bit)
    assert folders.newest_valid(run / "checkpoints") == (folder, [])
    assert is_as_written(folder, NEWER)


def test_a_manifest_cannot_become_one_of_the_first_format(run: Path) -> None:
    path = newest(run) / "manifest.json"
    text = path.read_bytes()
    first = text.replace(b'"version": 3', b'"version": 1')
    for other in (first, text[: text.rindex(b',\n "sha256"')] + b"\n}", text + b"\n"):
        path.write_bytes(other)
        check_fallback(run, path)


def test_only_a_manifest_whose_sum_is_right_is_of_another_release(run: Path) -> None:
    path = newest(run) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    later = {**manifest, "version": 4}
    path.write_text(json.dumps(later))
    check_fallback(run, path)
    del later["sha256"]
    path.write_bytes(manifest_text(later))
    with pytest.raises(IncompatibleCheckpointError, match=r"this release cannot read format .* version 4"):
        folders.newest_valid(run / "checkpoints")


# -------------------------------------------------------------------------------------- a manifest that is no damage


def _swapped(manifest: dict[str, Any]) -> None:
    group = manifest["tensors"]["param"]
    group["h.0.weight"], group["h.1.weight"] = group["h.1.weight"], group["h.0.weight"]


def _twice(manifest: dict[str, Any]) -> None:
    group = manifest["tensors"]["param"]
    group["h.0.weight"]["boxes"][0][1] = group["h.1.weight"]["boxes"][0][1]


def _other_kind(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["param"]["bias"] = manifest["tensors"]["exp_avg"]["bias"]


@pytest.mark.parametrize("change", [_swapped, _twice, _other_kind])
def test_a_box_is_called_as_its_tensor_is(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    seal(newest(run), change)
    with pytest.raises(CheckpointError, match="has the key "):
        Reader.open(newest(run))


def test_two_boxes_are_not_one_tensor_of_a_file(tmp_path: Path) -> None:
    # A parameter's name may be what the moment of another is called.
    flat = torch.arange(24.0)
    halves = flat_range_pieces(flat[:12], (6, 4), 0) + flat_range_pieces(flat[12:], (6, 4), 12)
    keeper = Checkpointer(tmp_path, Group(), lambda *_: None)
    both = [Shard("param", "exp_avg/w", (6, 4), halves), Shard("exp_avg", "w", (6, 4), halves)]
    keeper.save(1, both, {"step": 1}, background=False)
    with pytest.raises(CheckpointError, match=r"two boxes in .* have the key"):
        keeper.wait()
    assert folders.steps(tmp_path) == []


# --------------------------------------------------------------------------------------------------- any kind of harm


def _truncated(rng: random.Random, path: Path) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _longer(rng: random.Random, path: Path) -> None:
    with open(path, "ab") as file:
        file.write(rng.randbytes(rng.choice([1, 3, 4096])))


def _zeroed(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def _noise(rng: random.Random, path: Path) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def _removed(rng: random.Random, path: Path) -> None:
    path.unlink()


def _of_the_older(rng: random.Random, path: Path) -> None:
    shutil.copyfile(folders.step_folder(path.parent.parent, OLDER) / path.name, path)


def _of_a_neighbour(rng: random.Random, path: Path) -> None:
    other = rng.choice(sorted(p for p in path.parent.iterdir() if p != path))
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


def _link(rng: random.Random, path: Path) -> None:
    kept = path.parent.parent / "kept"
    os.replace(path, kept)
    path.symlink_to(rng.choice([kept, path, Path("/dev/zero"), path.parent / "nothing"]))


def _fifo(rng: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def _garbage(rng: random.Random, path: Path) -> None:
    texts = [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 10**5, b'{"step": NaN}', b'{"step": 1, "step": 2}']
    path.write_bytes(rng.choice(texts))


def _in_json(change: Callable[[random.Random, dict[str, Any]], None], rng: random.Random, path: Path) -> None:
    document = json.loads(path.read_bytes())
    change(rng, document)
    path.write_text(json.dumps(document, indent=rng.choice([None, 1])))


def _other_number(rng: random.Random, document: dict[str, Any]) -> None:
    stored = document["tensors"][rng.choice(["param", "exp_avg"])][rng.choice(list(SHAPES))]
    stored[rng.choice(["shape", "dtype", "boxes"])] = rng.choice([[0], [6, 4], "I32", "F32", []])


def _swapped_boxes(rng: random.Random, document: dict[str, Any]) -> None:
    one, other = (document["tensors"]["param"][name] for name in ("h.0.weight", "h.2.weight"))
    one["boxes"], other["boxes"] = other["boxes"], one["boxes"]


def _less(rng: random.Random, document: dict[str, Any]) -> None:
    part = document[rng.choice(["files", "tensors"])]
    del part[rng.choice(sorted(part))]


def _key_twice(rng: random.Random, path: Path) -> None:
    text = path.read_bytes()
    key = rng.choice([b"format", b"version", b"files", b"sha256"])
    path.write_bytes(text.replace(b"{", b'{"' + key + b'": 1,', 1))


FILE_HARM = [
    _truncated, _longer, _zeroed, _noise, _removed, _of_the_older, _of_a_neighbour, _link, _fifo, _folder, _garbage
]  # fmt: skip
MANIFEST_HARM = [
    _key_twice, partial(_in_json, _other_number), partial(_in_json, _swapped_boxes), partial(_in_json, _less)
]  # fmt: skip


def _whole_folder(rng: random.Random, folder: Path) -> None:
    shutil.rmtree(folder)
    make = rng.choice(["nothing in it", "file", "fifo", "dangling", "itself"])
    if make == "nothing in it":
        folder.mkdir()
    elif make == "file":
        folder.write_text("{}")
    elif make == "fifo":
        os.mkfifo(folder)
    else:
        folder.symlink_to(folder.parent / "nothing" if make == "dangling" else folder)


def _added(rng: random.Random, folder: Path) -> None:
    name = rng.choice(["model-00001-of-00002.safetensors", "pytorch_model.bin", "training-00009.safetensors", ".x"])
    (folder / name).write_bytes(rng.randbytes(100))


def content(folder: Path) -> dict[str, bytes]:
    """Of the plain files that a save wrote."""
    written = ("manifest.json", "state.json", "config.json", "tokenizer.json", "model.safetensors")
    names = [*written, "training-00000.safetensors"] if folder.is_dir() else []
    return {n: (folder / n).read_bytes() for n in names if (folder / n).is_file() and not (folder / n).is_symlink()}


def harmed(rng: random.Random, folder: Path) -> bool:
    """Harm a checkpoint in some way; whether all that was written is still there."""
    before = content(folder)
    path = rng.choice(sorted(folder.iterdir()))
    kind = rng.random()
    if kind < 0.06:
        _added(rng, folder)
    elif kind < 0.12:
        _whole_folder(rng, folder)
    elif kind < 0.25:
        rng.choice(MANIFEST_HARM)(rng, folder / "manifest.json")
    else:
        rng.choice(FILE_HARM)(rng, path)
    return content(folder) == before  # zeros may take the place of zeros, and a value its own


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write(tmp_path_factory.mktemp("run") / str(cut), cut) for cut in (False, True)]


def copies(originals: list[Path], seeds: range) -> Iterator[tuple[random.Random, Path]]:
    for seed in seeds:
        with tempfile.TemporaryDirectory() as place:
            yield random.Random(seed), Path(shutil.copytree(originals[seed % 2], Path(place, "run")))


@pytest.mark.parametrize("number", mostly_slow({"80": 80, "1000": 1000}, ["80"]))
def test_no_damage_is_silent(originals: list[Path], number: str, caplog: pytest.LogCaptureFixture) -> None:
    unharmed = 0
    for rng, run in copies(originals, range(int(number))):
        caplog.clear()
        intact = harmed(rng, newest(run))
        unharmed += intact
        for found in (folders.find_checkpoint(run), starting_point(run / "checkpoints", None, Group())):
            assert found is not None
            assert is_as_written(found, NEWER if intact else OLDER)
        warnings = [r.getMessage() for r in caplog.records if "skipping a damaged checkpoint" in r.getMessage()]
        assert len(warnings) == (0 if intact else 2)
        assert all(str(newest(run)) in warning and "\n" not in warning for warning in warnings)
    assert unharmed < 0.2 * int(number)


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling"])
def test_a_manifest_that_is_no_file_is_named(run: Path, kind: str) -> None:
    path = newest(run) / "manifest.json"
    path.unlink()
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "dangling": lambda: path.symlink_to("nothing")}[kind]()
    with pytest.raises(CheckpointError, match=str(path)):
        folders.find_checkpoint(newest(run))
    check_fallback(run, path)


@pytest.mark.parametrize("kind", ["file", "fifo", "dangling", "folder"])
def test_a_step_that_was_no_checkpoint_is_saved_again(run: Path, kind: str) -> None:
    for path in (newest(run), newest(run).with_name(f"{newest(run).name}.damaged")):
        shutil.rmtree(path, ignore_errors=True)
        {
            "file": path.touch,
            "fifo": lambda p=path: os.mkfifo(p),
            "dangling": lambda p=path: p.symlink_to("nothing"),
            "folder": path.mkdir,
        }[kind]()
    keeper = Checkpointer(run / "checkpoints", Group(), lambda *_: None)
    keeper.save(NEWER, shards(NEWER, cut=False), asdict(state(NEWER)), background=False)
    keeper.wait()
    assert folders.newest_valid(run / "checkpoints") == (newest(run), [])


# ------------------------------------------------------------------------------------------ what a save itself writes


@pytest.mark.parametrize("fault", ["replaced", "truncated", "rotten", "added", "linked"])
def test_a_save_that_did_not_write_what_it_should_fails(run: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted where the manifest has been written, as by another process or a file system that loses data."""

    def harm(folder: Path) -> None:
        path = next(p for p in sorted(folder.iterdir()) if p.suffix == ".safetensors")
        if fault == "replaced":
            path.write_bytes(b"other weights")
        elif fault == "truncated":
            os.truncate(path, path.stat().st_size - 1)
        elif fault == "rotten":
            flip(path, 8 * path.stat().st_size - 1)
        elif fault == "added":
            (folder / "model-00001-of-00001.safetensors").write_bytes(b"other weights")
        else:
            path.rename(run / "kept")
            path.symlink_to(run / "kept")

    complete = Checkpointer._complete

    def completed(self: Checkpointer, temporary: Path, *rest: Any) -> None:
        complete(self, temporary, *rest)
        harm(temporary)

    monkeypatch.setattr(Checkpointer, "_complete", completed)
    keeper = Checkpointer(run / "checkpoints", Group(), lambda *_: None)
    keeper.save(7, shards(7, cut=False), asdict(state(7)), background=False)
    with pytest.raises(CheckpointError, match=r"could not be written: .*safetensors.*; earlier checkpoints are intact"):
        keeper.wait()
    assert folders.newest_valid(run / "checkpoints") == (newest(run), [])
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step_000005", "step_000006"]


def _save_as_one_of_two(root: str, damaged: int) -> str:
    """What rank `damaged` wrote loses its last bit before it is read again; the sentence that says so."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = Group(dist.group.WORLD)
    write_share = Checkpointer._write_share

    def written(self: Checkpointer, temporary: Path, *rest: Any) -> dict[str, Any]:
        files = write_share(self, temporary, *rest)
        for name, entry in files.items() if group.rank == damaged else ():
            flip(temporary / name, 8 * entry["bytes"] - 1)
        return files

    Checkpointer._write_share = written  # type: ignore[method-assign]
    values = torch.arange(12.0)
    pieces = flat_range_pieces(values, (6, 4), 12 * group.rank)
    keeper = Checkpointer(Path(root), group, lambda *_: None)
    keeper.save(7, [Shard("param", "w", (6, 4), pieces)], {"step": 7}, background=False)
    try:
        keeper.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "nothing failed"


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [0, 1])
def test_every_rank_reads_its_own_files_again(tmp_path: Path, damaged: int) -> None:
    run = write(tmp_path / "run", cut=True)
    for said in run_ranks(2, _save_as_one_of_two, str(run / "checkpoints"), damaged):
        assert f"training-0000{damaged}.safetensors: contents do not match their checksum" in said
        assert f"(rank {damaged}); earlier checkpoints are intact" in said
    assert folders.newest_valid(run / "checkpoints") == (newest(run), [])


# ------------------------------------------------------------------------------------------------- as people meet it


@pytest.mark.slow
def test_programs_go_on_from_the_one_before(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    options = ("run.save_interval=2", "run.max_iters=4")
    newest = workspace.train("out", *options).checkpoint(4)
    path = newest / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"transformer.h.0.mlp", b"tsansformer.h.0.mlp", 1))
    warning = "step_000004/manifest.json: contents do not match the SHA-256 checksum in it"

    evaluated = workspace.evaluate("--checkpoint", "out", "--splits", "val")
    assert evaluated.code == 0
    assert warning in evaluated.err
    named = workspace.evaluate("--checkpoint", str(newest), "--splits", "val")
    assert named.code == 1
    assert warning in named.err
    assert "check that `model` is" not in named.err
    assert main(["export", "--checkpoint", str(workspace.path / "out"), "--output", str(workspace.path / "flat")]) == 0
    assert warning in caplog.text
    again = workspace.train("out", *options)
    assert warning in again.out
    assert "step_000002 at step 2" in again.out
    assert folders.newest_valid(newest.parent) == (newest, [])
    assert (newest.parent / "step_000004.damaged").is_dir()

    flip(newest / "model.safetensors", 8 * 5000)  # as pretrained weights, which nothing falls back from
    refused = workspace.train("other", f"model.pretrained={newest}", *options, fails=True)
    assert refused.code == 1
    assert "model.safetensors: contents do not match their checksum" in refused.err
