"""What an enemy who makes checkpoints has: valid ones, changes to them, and sums that are right again afterwards."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.boxes import Box, Piece, Shard
from crosstrain.checkpoint.checkpointer import Checkpointer
from crosstrain.checkpoint.files import Reader, file_sum
from crosstrain.checkpoint.load_weights import load_shards
from crosstrain.checkpoint.manifest import manifest_text
from crosstrain.distributed.group import Group
from crosstrain.training.state import State
from crosstrain.utils.errors import CheckpointError

MB = 2**20
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters and halves of characters


def shards(value: float = 0.0) -> list[Shard]:
    tensors = {
        ("param", "weight"): torch.full((6, 4), value),
        ("param", "bias"): torch.full((3,), value),
        ("param", "empty"): torch.zeros(0, 4),
        ("exp_avg", "weight"): torch.full((6, 4), value),
        ("step", "weight"): torch.tensor(value),
    }
    return [Shard(*key, tuple(t.shape), [Piece(Box.whole(t.shape), t)]) for key, t in tensors.items()]


def valid(root: Path) -> Path:
    """A valid checkpoint, in the folder of a run."""

    def write_assets(folder: Path, _: object) -> None:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"):
            (folder / name).write_text("{}")

    keeper = Checkpointer(root / "run" / "checkpoints", Group(), write_assets)
    keeper.save(5, shards(1.0), asdict(State(step=5, best_loss=1.5, scaler={"scale": 1.0})))
    keeper.wait()
    return folders.step_folder(keeper.root, 5)


def seal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Make the manifest right again after files were changed; `change` has the last word."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    names = {*manifest["files"], *(path.name for path in folder.iterdir())} - {"manifest.json"}
    manifest["files"] = {name: file_sum(folder / name) for name in names if (folder / name).is_file()}
    change(manifest)
    manifest.pop("sha256", None)
    (folder / "manifest.json").write_bytes(manifest_text(manifest))


@contextmanager
def frugal() -> Iterator[None]:
    """Fails where what is inside takes long or needs much memory."""

    def peak() -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return int(found[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before, start = peak(), time.process_time()  # others may use the machine too
    yield
    assert time.process_time() - start < 10
    assert peak() - before < 300 * MB


def opened(folder: Path) -> list[Shard]:
    """What a program that uses the checkpoint does with it."""
    found = folders.find_checkpoint(folder)
    Reader.open(found).verify()
    mine = shards()
    load_shards(Reader.open(found), mine)
    State.load(found)
    return mine


def refused(folder: Path) -> str:
    """The sentence that refuses the checkpoint, whether it or the run is asked for."""
    with frugal():
        for path in (folder.parent.parent, folder):
            with pytest.raises(CheckpointError) as caught:
                opened(path)
    sentence = str(caught.value)
    assert not STEERING.search(sentence)
    assert "\n" not in sentence
    assert len(sentence) < 1000 + len(str(folder))
    assert str(folder) in sentence
    return sentence


def raw(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of this header, which may claim another length."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def plant(path: Path, marker: Path, form: str) -> None:
    """Put something at `path` that creates `marker` when it is unpickled."""
    if form == "pickle":
        path.write_bytes(pickle.dumps(Bomb(marker)))
    else:
        torch.save({"weight": Bomb(marker)}, path)


FEW = settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**60, 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["F32", "model.safetensors", "bias", "weight", "param", "", "..", "\ud800"])
)
VALUES = st.recursive(
    ATOMS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=6
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in parsed JSON."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def mutated(document: Any, data: st.DataObject) -> Any:
    """`document` with a few of its values replaced or removed."""
    root = {"": copy.deepcopy(document)}
    for _ in range(data.draw(st.integers(1, 3))):
        *path, key = data.draw(st.sampled_from(list(places(root))[1:]))
        parent: Any = root
        for step in path:
            parent = parent[step]
        if data.draw(st.integers(0, 3)) or not path:
            parent[key] = data.draw(VALUES)
        else:
            del parent[key]
    return root[""]


HARMFUL = "a" * 4000 + "b"  # never ends under the expression of `never_ends`


def never_ends(folder: Path, expression: str = "a*a*$") -> None:
    """Give a tokenizer an expression that takes minutes for many letters a and a b."""
    document = json.loads((folder / "tokenizer.json").read_text())
    cut = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, document["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(document))
