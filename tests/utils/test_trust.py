"""A checkpoint is data: opening one starts, fetches and changes nothing, and opens no file that its user did not name.

Whose configuration it is decides the rest: one's own run is evaluated as before, a stranger's on its user's word alone.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenFile
from crosstrain_plugins.builtin.datasets.prepared import Summary
from crosstrain_plugins.builtin.datasets.row_audit import RowAudit
from crosstrain_plugins.builtin.datasets.vision.image import open_image_file
from webdataset.gopen import gopen_schemes

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.data.chat import SampleError
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.data.tokenizer import load_gpt2, load_tokenizer
from crosstrain.inference.open_checkpoint import saved_config
from crosstrain.utils import trust
from crosstrain.utils.assets import MODEL_FILES, TOKENIZER_FILES
from crosstrain.utils.errors import ConfigError, DataError, UserError
from crosstrain.utils.trust import Trust
from fixtures_hostile import (
    BOMBS,
    EVALUATE,
    EXPORT,
    GENERATE,
    ODD_COMMANDS,
    REPORT,
    SCHEMES,
    Case,
    cases,
    open_all,
    place_of_harm,
    put,
    setting,
)
from fixtures_ranks import mostly_slow, train
from fixtures_shards import module_of
from fixtures_tampering import frugal, seal

shards = module_of("image_text", "webdataset")
annotations = module_of("instructions", "annotations")


@pytest.fixture(scope="module")
def trained(shared_workspace: Workspace) -> Path:
    return train(shared_workspace.project, "out", "run.max_iters=1").checkpoint(1)


def reported(name: str, kind: str) -> Case:
    """A report of a run whose file `name` is something else."""

    def change(checkpoint: Path) -> None:
        run = checkpoint.parent.parent
        for file in ("metrics.jsonl", "config.yaml", "log.txt"):
            (run / file).write_text('{"step": 1, "loss": 2.0}\n')
        put(name, kind)(run)

    return Case(f"report: {name} is {kind}", REPORT, after=[change], refused=name == "metrics.jsonl")


def expected(place: str) -> list[Case]:
    """Those that are always tried: what once did harm, reports, and a stranger's checkpoint that does none."""
    images = {"tokenizer": f"{place}/words", "image_tokens": 1}
    datasets = {
        "a brace around a command": {"name": "image_text", **images, "val": f"{{pipe:touch {place}/harm,zz}}",
                                      "test": "a"},
        "shapes": {"name": "shapes", "path": f"{place}/shapes", "images": 8, "held_out": 4},
        "a mixture of shapes": {"name": "mixture",
                                "parts": [{"dataset": {"name": "shapes", "path": f"{place}/shapes"}}]},
        "preparing": {"name": "text", "path": f"{place}/p", "seq_length": 8,
                      "prepare": {"input": [{"name": "text", "path": "/etc/passwd"}], "train_tokenizer": 300}},
        "a cache": {"name": "image_text", **images, "cache": f"{place}/cache", "val": "a.tar"},
        "an endless file": {"name": "instructions", "annotations": "/dev/zero", "images": "/", "tokenizer": "gpt2"},
        "an address": {"name": "image_text", **images, "val": "http://127.0.0.1:9/x.tar", "test": "a"},
    }  # fmt: skip
    found = [Case(name, EVALUATE, [setting("datasets", {"x": value})]) for name, value in datasets.items()]
    found += [
        reported(name, kind) for name in ("metrics.jsonl", "config.yaml", "log.txt") for kind in ("fifo", "/etc/passwd")
    ]
    stranger = setting("datasets", {"x": datasets["shapes"]})
    return [*found, *(Case(f"unharmed: {c[0]}", c, [stranger], refused=False) for c in (GENERATE, EXPORT))]


def opened_without_harm(some: list[Case], trained: Path, place: Path, root: Path) -> str:
    """Asserts that none of the cases did harm; the figures."""
    seen = open_all(some, trained, place, root)
    wrong = {
        f"{number} {case.name}": [*complaints, one.err[-1500:]]
        for number, (case, one) in enumerate(zip(some, seen, strict=True))
        if (complaints := one.complaints(case.refused))
    }
    assert not wrong, json.dumps(wrong, indent=1)
    for case, one in zip(some, seen, strict=True):
        if case.name.startswith("unharmed"):
            assert one.code == 0, one.err
    for folder in root.glob("*/out"):  # what was exported of whatever could be
        if folder.is_dir():
            weights = {path.name for path in folder.iterdir() if path.name.startswith("model")}
            assert {path.name for path in folder.iterdir()} - weights <= TOKENIZER_FILES | MODEL_FILES
            texts = [path.read_text() for path in folder.iterdir() if path.name.endswith("config.json")]
            assert not [word for word in ("auto_map", "name_or_path", "custom_generate") for t in texts if word in t]
    opened, longest, most = sum(o.code == 0 for o in seen), max(o.seconds for o in seen), max(o.peak for o in seen)
    return f"{len(seen)} checkpoints, {opened} of them opened; at most {longest:.1f} s and {most >> 20} MiB"


@pytest.mark.slow
def test_hostile_checkpoints_do_no_harm(trained: Path, tmp_path: Path) -> None:
    place = place_of_harm(tmp_path / "place")
    drawn = itertools.islice(cases(1, str(place)), 12)
    opened_without_harm([*expected(str(place)), *drawn], trained, place, tmp_path / "cases")


@pytest.mark.slow
def test_two_hundred_hostile_checkpoints_do_no_harm(trained: Path, tmp_path: Path) -> None:
    place = place_of_harm(tmp_path / "place")
    drawn = itertools.islice(cases(2, str(place)), 200)
    print(opened_without_harm(list(drawn), trained, place, tmp_path / "cases"))


@pytest.mark.slow
def test_the_record_shows_harm_where_a_stranger_is_trusted(trained: Path, tmp_path: Path) -> None:
    """What is recorded without the gate, so that a test that finds nothing has looked."""
    place = place_of_harm(tmp_path / "place")
    some = [case for case in expected(str(place)) if case.name in ("shapes", "a cache", "preparing", "an address")]
    for case, one in zip(some, open_all(some, trained, place, tmp_path / "cases", trusting=True), strict=True):
        assert one.files, case.name
        if case.name != "an address":
            assert one.made, case.name
    assert any("/etc/passwd" in told for told in one.files) or place.joinpath("p").exists()


# ---- whose configuration it is


def test_a_run_of_this_user_is_trusted_with_its_data_and_nothing_else(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved_config(trained, []).trust == Trust.DATA
    moved = Path(shutil.copytree(trained, tmp_path / "moved"))
    assert saved_config(moved, ["run.device=cpu"]).trust == Trust.DATA
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another account"))
    config = saved_config(trained, [])
    assert config.trust == Trust.NOTHING
    assert not (tmp_path / "another account").exists()
    for use in (prepare_data, lambda c: open_split(c, "val")):
        with pytest.raises(ConfigError, match=r"not trained under this account.*--trust-data"):
            use(config)
    trusted = saved_config(trained, [], trust_data=True)
    assert trusted.trust == Trust.DATA
    assert len(open_split(trusted, "val"))


@pytest.mark.parametrize(
    ("keys", "value", "own"),
    [
        (("datasets", "tiny", "path"), "elsewhere", False),
        (("model", "pretrained"), "gpt2", False),
        (("run", "runner", "name"), "fsdp", False),
        (("run", "num_workers"), 10**9, True),  # evaluation takes its own number
        (("run", "compile"), "model", True),  # and this never
    ],
)
def test_a_signature_is_of_one_configuration(
    trained: Path, tmp_path: Path, keys: tuple[str, ...], value: object, own: bool
) -> None:
    copied = Path(shutil.copytree(trained, tmp_path / "copied"))
    state = json.loads((copied / "state.json").read_text())
    place = state["config"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (copied / "state.json").write_text(json.dumps(state))
    seal(copied)
    config = saved_config(copied, [])
    assert config.trust == (Trust.DATA if own else Trust.NOTHING)
    assert config.run.compile == "none"
    assert config.run.runner.name == "ddp"
    assert config.run.num_workers <= (os.cpu_count() or 1)


@pytest.mark.parametrize("signed", [None, "", 7, "x" * 64, "\u00e9\ud800", ["x"]])
def test_what_is_no_signature_is_none(signed: object) -> None:
    assert trust.signature({"model": {}}) is not None
    assert not trust.is_own({"model": {}}, signed)


def test_the_key_is_its_owners_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = {"model": {"a": (1, 2)}, "datasets": {9: 1, 10: 2}, "run": {"runner": {"name": "x"}}}
    signed = trust.signature(config)
    assert trust.signature(config) == signed
    assert trust.is_own(json.loads(json.dumps(config)), signed)
    key = tmp_path / "state" / "crosstrain" / "signing.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert list(key.parent.iterdir()) == [key]
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert trust.signature(config) is None
    assert not trust.is_own(config, signed)


# ---- names of shards, whoever gives them


@pytest.mark.parametrize("name", mostly_slow(BOMBS, BOMBS[:1]))
def test_a_name_that_stands_for_too_much_is_refused_at_once(name: str) -> None:
    with nullcontext() if "*" in name else frugal(), pytest.raises(DataError):  # those are given up after a while
        shards.expand(name)


@pytest.mark.parametrize("scheme", [*SCHEMES, "PIPE", "Http", " http", "pipe ", "p\nipe"])
def test_a_name_is_a_file_a_known_address_or_refused(scheme: str) -> None:
    name = f"{scheme}://host/x.tar"
    known = {"http", "https", "ftps", "sftp", "scp", "gs", "hf", "ais", "htgs"}
    known = known & set(gopen_schemes) | {"s3"}  # older webdataset lacks hf; s3 is read by fsspec
    if scheme == "file":
        assert (shards.expand(name), shards.local_path(name)) == ([name], Path("host/x.tar"))
    elif scheme in known:
        assert shards.is_remote(name)
    else:
        with pytest.raises(DataError):
            shards.expand(name)


@pytest.mark.parametrize("name", ODD_COMMANDS)
def test_no_spelling_of_a_command_passes_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with trust.limited_to(Trust.DATA), pytest.raises((UserError, OSError)):
        shards.prepare(shards.expand(name.format(c="touch harm")), tmp_path.with_name("cache"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "folder", "socket", "/dev/stdin"])
def test_what_is_no_regular_file_is_never_read(tmp_path: Path, kind: str) -> None:
    put("special", kind)(tmp_path)
    special = tmp_path / "special"
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text("{}")
    uses: list[Callable[[], object]] = [
        lambda: list(annotations.read_annotations(special, RowAudit())),
        lambda: shards.prepare([str(special)], tmp_path / "cache"),
        lambda: open_image_file(special), lambda: load_config(special),
        lambda: load_gpt2(vocabulary, special), lambda: TokenFile(special), lambda: Summary.read(special),
    ]  # fmt: skip
    if kind != "folder":
        uses.append(lambda: load_tokenizer(special))
    special.with_name("special.idx").symlink_to(special)
    for use in uses:
        with frugal(), pytest.raises((UserError, SampleError, OSError)):
            use()
