"""Checkpoint files: exact, atomic, checked; a damaged folder is refused."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import ENVIRONMENT, ROOT
from crosstrain.checkpoint import folders
from crosstrain.checkpoint.boxes import Piece, Shard, flat_range_pieces, whole_pieces
from crosstrain.checkpoint.checkpointer import Checkpointer, load_state
from crosstrain.checkpoint.files import Reader, write_safetensors
from crosstrain.checkpoint.load_weights import load_shards
from crosstrain.checkpoint.manifest import manifest_text
from crosstrain.distributed.group import Group
from crosstrain.utils.errors import CheckpointError


def shards(seed: int = 0) -> list[Shard]:
    g = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(6, 4, generator=g), torch.randn(3, generator=g)
    return [
        Shard("param", "layer.weight", (6, 4), whole_pieces(weight, (6, 4))),
        Shard("param", "layer.bias", (3,), whole_pieces(bias, (3,))),
        Shard("exp_avg", "layer.weight", (6, 4), whole_pieces(weight * 2, (6, 4))),
        Shard("step", "layer.weight", (), whole_pieces(torch.tensor(7.0), ())),
    ]


def checkpointer(root: Path, **retention: int | None) -> Checkpointer:
    return Checkpointer(root, Group(), lambda *_: None, **retention)  # type: ignore[arg-type]


def saved(root: Path, step: int = 5) -> Path:
    keeper = checkpointer(root)
    keeper.save(step, shards(), {"step": step})
    keeper.wait()
    return folders.step_folder(root, step)


def test_round_trip_through_other_boxes(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    memory = torch.zeros(24)
    pieces = [p for a, b in [(0, 5), (5, 6), (6, 24)] for p in flat_range_pieces(memory[a:b], (6, 4), a)]
    step = torch.tensor(0.0)
    wanted = [
        Shard("exp_avg", "layer.weight", (6, 4), pieces),
        Shard("step", "layer.weight", (), whole_pieces(step, ())),
    ]
    Reader.open(folder).fill(wanted)
    assert torch.equal(memory.view(6, 4), shards()[2].pieces[0].data)
    assert step == 7.0


def test_files_are_plain_safetensors_and_hugging_face_names(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert set(load_file(folder / "model.safetensors")) == {"layer.weight", "layer.bias"}
    assert load_state(folder)["step"] == 5


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_every_type_is_read_by_the_safetensors_library(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.arange(6).view(2, 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 2).to(dtype),
    }
    entry = write_safetensors(tmp_path / "x.safetensors", tensors)
    assert entry["bytes"] == (tmp_path / "x.safetensors").stat().st_size
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[key], tensors[key]) and read[key].dtype == dtype for key in tensors)


def test_the_state_that_was_saved_is_the_one_at_the_call(tmp_path: Path) -> None:
    live = shards()
    keeper = checkpointer(tmp_path)
    keeper.save(1, live, {"step": 1})
    live[0].pieces[0].data.zero_()  # training goes on while the file is being written
    keeper.wait()
    read = load_file(folders.step_folder(tmp_path, 1) / "model.safetensors")
    assert torch.equal(read["layer.weight"], shards()[0].pieces[0].data)


def test_retention_keeps_the_newest_the_multiples_and_the_best(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 10):
        keeper.save(step, shards(), {"step": step}, pointers=["best"] * (step == 3))
    keeper.wait()
    assert folders.steps(tmp_path) == [3, 4, 8, 9]
    assert folders.read_pointer(tmp_path, "best") == 3
    assert folders.read_pointer(tmp_path, "latest") == 9


def test_a_hole_is_refused_before_the_checkpoint_appears(tmp_path: Path) -> None:
    part = torch.zeros(2, 4)
    (piece,) = whole_pieces(part, (2, 4))
    keeper = checkpointer(tmp_path)
    keeper.save(1, [Shard("param", "w", (6, 4), [Piece(piece.box, part)])], {"step": 1})
    with pytest.raises(CheckpointError, match="16 of its 24 elements are not in any file"):
        keeper.wait()
    assert folders.steps(tmp_path) == []


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    program = f"""
import resource, sys
sys.path[:0] = [{str(ROOT / "platform")!r}, {str(ROOT / "tests")!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
from test_store import checkpointer, shards
from crosstrain.utils.errors import CheckpointError
keeper = checkpointer(Path({str(tmp_path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # writes beyond 200 bytes fail as on a full disk
keeper.save(6, shards(), {{"step": 6}})
try:
    keeper.wait()
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert "could not be written" in done.stdout, done.stderr
    assert "earlier checkpoints are intact" in done.stdout
    assert folders.newest_valid(tmp_path) == (folders.step_folder(tmp_path, 5), [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000005"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 200


def _edit(folder: Path, change: Callable[[dict], None]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    del manifest["sha256"]
    (folder / "manifest.json").write_bytes(manifest_text(manifest))


def test_another_version_is_neither_used_nor_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    _edit(saved(tmp_path, 6), lambda manifest: manifest.update(version=99))
    with pytest.raises(CheckpointError, match=r"this release cannot read format .* version 99"):
        folders.newest_valid(tmp_path)


def test_a_failed_save_does_not_keep_the_next_from_trying(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    outcomes = iter([OSError(28, "No space left on device"), None])

    def write_config(folder: Path, _: object) -> None:
        if problem := next(outcomes):
            raise problem

    keeper = Checkpointer(tmp_path, Group(), write_config)
    keeper.save(6, shards(), {"step": 6})
    keeper.save(7, shards(), {"step": 7})
    keeper.wait()
    assert folders.steps(tmp_path) == [5, 7]


def test_a_key_whose_stored_shape_differs_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", {"layer.weight": torch.zeros(4, 6), "layer.bias": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"layer\.weight has shape"):
        load_shards(Reader.open(folder), shards(1))


def test_model_and_checkpoint_must_hold_the_same(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"parameters that the model lacks, such as layer\.bias"):
        load_shards(Reader.open(folder), shards()[:1])
    with pytest.raises(CheckpointError, match="the model's head is missing"):
        load_shards(Reader.open(folder), [*shards(), Shard("param", "head", (3,), whole_pieces(torch.zeros(3), (3,)))])
    wide = Shard("param", "layer.bias", (4,), whole_pieces(torch.zeros(4), (4,)))
    with pytest.raises(CheckpointError, match=r"\[3\] in the checkpoint and \[4\] in the model"):
        load_shards(Reader.open(folder), [shards()[0], wide])


@pytest.mark.parametrize("damage", ["truncate", "delete", "flip"])
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, 5)
    newest = saved(tmp_path, 6)
    victim = newest / "training-00000.safetensors"
    content = victim.read_bytes()
    if damage == "truncate":
        victim.write_bytes(content[:-3])
    elif damage == "flip":
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        victim.unlink()
    found, complaints = folders.newest_valid(tmp_path)
    assert found == folders.step_folder(tmp_path, 5)
    assert len(complaints) == 1
    assert str(victim) in complaints[0]
