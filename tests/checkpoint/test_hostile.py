"""A checkpoint made by an enemy executes nothing, takes no time and no memory, and is refused in one sentence.

Every sum in it is right: whoever made it wrote the manifest too. What is not refused does no harm, and is named so.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.checkpoint.files import write_safetensors
from crosstrain.checkpoint.manifest import manifest_text
from crosstrain.cli.main import main
from crosstrain.utils.errors import CheckpointError, UserError
from fixtures_ranks import mostly_slow
from fixtures_tampering import FEW, MB, Bomb, entry, frugal, mutated, opened, plant, raw, refused, seal, valid


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid checkpoint, in the folder of a run."""
    return valid(tmp_path)


# ---------------------------------------------------------------------------------------------------------- manifest


def box(index: int, value: Any) -> Callable[[dict], object]:
    """Sets file, key, offset or shape of the box of `bias`."""
    return lambda m: m["tensors"]["param"]["bias"]["boxes"][0].__setitem__(index, value)


def bias(**changes: Any) -> Callable[[dict], object]:
    return lambda m: m["tensors"]["param"]["bias"].update(changes)


def boxes(*blocks: tuple[list, list]) -> Callable[[dict], object]:
    """Sets the boxes of `bias` to these offsets and shapes."""
    return bias(boxes=[["model.safetensors", "bias", offset, shape] for offset, shape in blocks])


def file(name: Any, entry: Any = None) -> Callable[[dict], object]:
    return lambda m: m["files"].update({name: entry or {"bytes": 1, "sha256": "0"}})


def claimed(shape: list[int]) -> Callable[[dict], object]:
    """A tensor of this shape in one box, in a file that the manifest says is large enough."""

    def change(manifest: dict) -> None:
        bias(shape=shape)(manifest)
        boxes(([0] * len(shape), shape))(manifest)

    return change


def lies(shape: list[int], size: Any) -> Callable[[dict], object]:
    def change(manifest: dict) -> None:
        claimed(shape)(manifest)
        manifest["files"]["model.safetensors"]["bytes"] = size

    return change


def tensor_named(name: str) -> Callable[[dict], object]:
    return lambda m: m["tensors"]["param"].update({name: m["tensors"]["param"].pop("bias")})


def kind_named(name: str) -> Callable[[dict], object]:
    return lambda m: m["tensors"].update({name: m["tensors"].pop("exp_avg")})


NAMES = {
    "a newline": "bias\nerror: all is well", "an escape": "bias\x1b[2J", "half a character": "bias\ud800",
    "a reversal": "bias\u202etxt", "a null": "bias\0", "a novel": "bias" * 10**6,
}  # fmt: skip
SIZES = {
    "a negative number": -1, "a fraction": 3.5, "a whole float": 3.0, "NaN": float("nan"), "Infinity": float("inf"),
    "true": True, "text": "3", "null": None, "a list": [3], "an object": {}, "2^63": 2**63, "4000 digits": 10**4000,
}  # fmt: skip
MANIFESTS: dict[str, Callable[[dict], object]] = {
    "another format": lambda m: m.update(format="other"),
    "a format of control characters": lambda m: m.update(format="\x1b[2J\n"),
    "a format of any length": lambda m: m.update(format="x" * 10**7),
    "a later version": lambda m: m.update(version=99),
    "no files": lambda m: m.pop("files"),
    "no tensors": lambda m: m.pop("tensors"),
    "tensors that are a list": lambda m: m.update(tensors=[1, 2]),
    "a kind that is a list": lambda m: m["tensors"].update(param=[1, 2]),
    "a tensor that is a number": lambda m: m["tensors"]["param"].update(bias=7),
    "a tensor too few": lambda m: m["tensors"]["param"].pop("bias"),
    "a tensor too many": lambda m: m["tensors"]["param"].update(more={"shape": [0], "dtype": "F32", "boxes": []}),
    "a tensor of another name": tensor_named("bios"),
    "a tensor named like a header's part": tensor_named("__metadata__"),
    **{f"a tensor with {what} in its name": tensor_named(name) for what, name in NAMES.items()},
    **{f"a kind with {what} in its name": kind_named(name) for what, name in NAMES.items()},
    **{f"a file called {name!r:.40}": file(name) for name in (
        "../state.json", "/etc/passwd", "..", ".", "", "sub/../../x", "sub/x", "/", "~/x", ".hidden", "x" * 5000,
        "file:///etc/passwd", *NAMES.values())},
    "a file that is not there": file("other.safetensors"),
    "a file that is a number": file("other.safetensors", 7),
    "a file without a sum": file("other.safetensors", {"bytes": 1}),
    "a sum of null": file("config.json", {"bytes": 2, "sha256": None}),
    **{f"a file of {what} bytes": file("config.json", {"bytes": size, "sha256": "0"}) for what, size in SIZES.items()},
    "a box in an unlisted file": box(0, "other.safetensors"),
    "a box in another folder": box(0, "../../../other.safetensors"),
    "a box at an absolute path": box(0, "/etc/passwd"),
    "a box in a file that is not safetensors": box(0, "config.json"),
    "a box in a null": box(0, None),
    "a key that is not there": box(1, "nothing"),
    "a key that is another tensor": box(1, "weight"),
    "a key that is null": box(1, None),
    **{f"a key with {what}": box(1, name) for what, name in NAMES.items()},
    **{f"an offset of {what}": box(2, [size]) for what, size in SIZES.items()},
    **{f"a box's shape of {what}": box(3, [size]) for what, size in SIZES.items()},
    **{f"a shape of {what}": bias(shape=[size]) for what, size in SIZES.items()},
    "a shape that is a number": bias(shape=3),
    "a shape that is text": bias(shape="3"),
    "an offset of more dimensions": box(2, [0, 0]),
    "a box of more dimensions": boxes(([0, 0], [3, 1])),
    "another shape": claimed([4]),
    "a shape of as many elements": claimed([3, 1]),
    "a hundred thousand dimensions": claimed([1] * 100_000),
    "10^18 elements": claimed([10**18]),
    "2^62 elements and a file for them": lies([2**60], 2**62 - 1),
    "2^96 elements": lies([2**32] * 3, 2**62 - 1),
    "2^62 columns of nothing": lies([0, 2**61, 2**61], 2**62 - 1),
    "elements that their file has no room for": claimed([1000]),
    "no box": boxes(),
    "a box outside": boxes(([1], [3])),
    "a hole": boxes(([0], [1]), ([2], [1])),
    "a box twice": boxes(([0], [3]), ([0], [3])),
    "a hole and an overlap of the same size": boxes(([0], [2]), ([1], [1])),
    "a hundred thousand boxes in a row that overlap": lambda m: m["tensors"]["param"].update(
        bias={"shape": [1, 100_000], "dtype": "BOOL",
              "boxes": [["model.safetensors", "bias", [0, i], [1, 1]] for i in range(99_999)]
              + [["model.safetensors", "bias", [0, 99_998], [1, 1]]]}),
    "boxes that are a number": bias(boxes=7),
    "boxes that are numbers": bias(boxes=[7]),
    "a box of three": bias(boxes=[["model.safetensors", "bias", [0]]]),
    "an unknown type": bias(dtype="F128"),
    "a type that is null": bias(dtype=None),
    "a type that is a list": bias(dtype=["F32"]),
    "another type of the same size": bias(dtype="I32"),
    "another type": bias(dtype="BF16"),
}  # fmt: skip


@pytest.mark.parametrize(
    "attack", mostly_slow(MANIFESTS, [name for name in MANIFESTS if "hundred thousand boxes" not in name])
)
def test_a_manifest_that_lies_is_refused(folder: Path, attack: str) -> None:
    seal(folder, MANIFESTS[attack])
    refused(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"null", b"7", b'"text"', b"NaN", b"{", b"\xff\xfe\xfd", b"\0" * 1000, b"[" * 10**6,
        b'{"a":' * 10**6, b"[" * 900 + b"]" * 900, b"1" * 10**6, b"[" + b"[]," * (10 * MB) + b"[]]",
    ],
    ids=[
        "nothing", "a list", "null", "a number", "text", "NaN", "the beginning of an object", "no text", "zeros",
        "nested lists", "nested objects", "nested lists that end", "a million digits", "ten million lists",
    ],
)  # fmt: skip
def test_json_that_is_none_or_something_else_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    if name == "state.json":
        seal(folder)
    refused(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_gigabyte_of_zeros_is_not_read(folder: Path, name: str) -> None:
    os.truncate(folder / name, 2**30)
    assert "bytes" in refused(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_key_that_stands_twice_is_refused(folder: Path, name: str) -> None:
    text = (folder / name).read_text()
    key = "format" if name == "manifest.json" else "step"
    (folder / name).write_text(text.replace("{", f'{{"{key}": 7,', 1))
    if name == "state.json":
        seal(folder)
    assert "twice" in refused(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "endless device", "folder", "link to the same", "link to itself"])
def test_what_is_no_plain_file_is_not_opened(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    seal(folder)
    path = folder / name
    path.rename(tmp_path / name)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"endless device": Path("/dev/zero"), "link to itself": path}.get(kind, tmp_path / name))
    if name == "manifest.json":  # then the folder itself is no checkpoint, or is none that can be read
        with frugal(), pytest.raises(CheckpointError):
            opened(folder)
        with frugal(), pytest.raises(CheckpointError):
            opened(folder.parent.parent)
    else:
        refused(folder)


# ------------------------------------------------------------------------------------------------------------- state


def setting(key: str, value: Any) -> Callable[[dict], object]:
    return lambda state: state.update({key: value})


def lacking(key: str) -> Callable[[dict], object]:
    return lambda state: state.pop(key)


STATES: dict[str, Callable[[dict], object]] = {
    **{f"{key} of {what}": setting(key, value)
       for key in ("step", "applied_steps", "samples") for what, value in SIZES.items()},
    **{f"no {key}": lacking(key)
       for key in ("step", "applied_steps", "samples", "best_loss", "scaler")},
    **{f"a best loss of {value!r:.20}": setting("best_loss", value)
       for value in (float("nan"), float("-inf"), "1.5", True, [], 10**400)},
    **{f"a scaler of {value!r:.40}": setting("scaler", value)
       for value in (None, [], "x", {"scale": float("inf")}, {"scale": "1"}, {"scale": 10**400}, {"\x1b[2J": [[]]})},
    **{f"numbers left out {value!r:.40}": setting("left_out", value)
       for value in (None, "x", [3], [[3]], [[4, 3]], [[1, 5], [4, 9]], [[8, 9], [1, 2]], [[-1, 2]], [[0, 10**400]])},
    **{f"skipped steps {value!r:.40}": setting("skipped", value) for value in ({}, [[1, 2]], [[1, 2, "3"]])},
    **{f"recent losses {value!r:.40}": setting("recent_losses", value) for value in (None, [float("nan")], ["1"])},
    **{f"{key} of {value!r}": setting(key, value)
       for key in ("bad_in_a_row", "overflows_in_a_row") for value in (-1, "1", None)},
}  # fmt: skip


@pytest.mark.parametrize("attack", STATES)
def test_a_state_that_makes_no_sense_is_refused(folder: Path, attack: str) -> None:
    state = json.loads((folder / "state.json").read_text())
    STATES[attack](state)
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)
    refused(folder)


# ------------------------------------------------------------------------------------------------------------- files


WEIGHT, BIAS = entry("F32", [6, 4], 0, 96), entry("F32", [3], 96, 108)
FILES = {
    "nothing": b"",
    "a header longer than the file": raw({}, length=10**6),
    "a header of 2^63 bytes": raw({}, length=2**63),
    "a header that is no JSON": raw(b"{" * 100),
    "a header of nested lists": raw(b'{"bias":' + b"[" * 10**6),
    "tensors longer than the file": raw({"weight": entry("F32", [2**40], 0, 2**42)}, bytes(108)),
    "offsets that run backwards": raw({"weight": entry("F32", [6, 4], 96, 0), "bias": BIAS}, bytes(108)),
    "tensors that overlap": raw({"weight": WEIGHT, "bias": entry("F32", [3], 84, 96)}, bytes(96)),
    "a type that there is not": raw({"weight": WEIGHT, "bias": entry("PICKLE", [3], 96, 108)}, bytes(108)),
    "another type": raw({"weight": WEIGHT, "bias": entry("I32", [3], 96, 108)}, bytes(108)),
    "half the type": raw({"weight": WEIGHT, "bias": entry("BF16", [6], 96, 108)}, bytes(108)),
    "another shape": raw({"weight": WEIGHT, "bias": entry("F32", [1, 3], 96, 108)}, bytes(108)),
    "a tensor less": raw({"weight": WEIGHT}, bytes(96)),
}


@pytest.mark.parametrize("attack", FILES)
def test_a_safetensors_file_that_lies_is_refused(folder: Path, attack: str) -> None:
    (folder / "model.safetensors").write_bytes(FILES[attack])
    seal(folder)
    refused(folder)


# ----------------------------------------------------------------------------------------------------------- pickles


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "training-00000.safetensors"])
def test_a_pickle_is_refused_and_not_opened(folder: Path, tmp_path: Path, name: str, form: str) -> None:
    plant(folder / name, tmp_path / "exploded", form)
    if name != "manifest.json":
        seal(folder)
    refused(folder)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists(), "it would have"


HARMLESS = [
    "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "model.safetensors.index.json",
    "pytorch_model.bin", "training.pt", "optimizer.pt", "modeling.py", "__init__.py", "../latest", "../best",
]  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_pickle_is_harmless_where_nobody_looks(folder: Path, tmp_path: Path, name: str) -> None:
    """Weights and state are read from other files; for the tokenizer's, see the processes below."""
    plant(folder / name, tmp_path / "exploded", "pickle")
    seal(folder)
    for path in (folder, folder.parent.parent):
        loaded = opened(path)
        assert all(shard.pieces[0].data.eq(1.0).all() for shard in loaded)
    with pytest.raises(CheckpointError):  # a pointer that is none points nowhere
        opened(folder.parent / "latest" / "x")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("text", ["../../../etc", "/etc", "step_" + "9" * 5000, "step_00000\u0665", "\0", "x" * 10**6])
def test_a_pointer_means_a_step_beside_it_or_nothing(folder: Path, text: str) -> None:
    (folder.parent / "latest").write_text(text)
    with frugal(), pytest.raises(CheckpointError, match="neither a checkpoint nor a pointer to one"):
        opened(folder.parent / "latest")
    assert opened(folder.parent.parent)


def test_values_that_are_not_finite_are_only_values(folder: Path) -> None:
    tensors = {
        "weight": torch.full((6, 4), float("nan")), "bias": torch.full((3,), float("inf")), "empty": torch.zeros(0, 4),
    }  # fmt: skip
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    seal(folder)
    assert opened(folder)[0].pieces[0].data.isnan().all()


def test_keys_that_nobody_reads_are_harmless(folder: Path) -> None:
    seal(folder, lambda m: m.update({"auto_map": "evil.Class", "__reduce__": ["os.system", "true"]}))
    assert opened(folder)


# ---------------------------------------------------------------------------------------------------- anything at all


@FEW
@given(st.data())
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_any_change_is_refused_or_harmless(folder: Path, tmp_path: Path, name: str, data: st.DataObject) -> None:
    # The folder is not made anew for each example, so what was in it is kept beside it.
    path, original = folder / name, tmp_path / name
    if not original.exists():
        seal(folder)
        shutil.copyfile(path, original)
    changed = mutated(json.loads(original.read_text()), data)
    if name == "state.json" or not isinstance(changed, dict):
        path.write_text(json.dumps(changed))
    else:
        changed.pop("sha256", None)
        path.write_bytes(manifest_text(changed))
    if name == "state.json":
        seal(folder)
    with suppress(UserError):
        opened(folder)


@pytest.mark.parametrize("attack", ["a key that is not there", "another type", "10^18 elements", "a box twice"])
def test_export_refuses_it_too(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], attack: str) -> None:
    seal(folder, MANIFESTS[attack])
    with frugal():
        assert main(["export", "--checkpoint", str(folder), "--output", str(tmp_path / "out")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.glob("*out*"))
