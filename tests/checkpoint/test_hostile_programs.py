"""A checkpoint made by an enemy, in the hands of the program: one sentence, nothing executed, a terminal unharmed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Workspace
from crosstrain.api import evaluate
from crosstrain.cli.main import main
from crosstrain.inference.encoding import open_tokenizer
from crosstrain.utils.errors import CheckpointError
from crosstrain.utils.logging import log, set_up_logging
from fixtures_processes import program
from fixtures_ranks import train
from fixtures_tampering import FEW, STEERING, entry, frugal, mutated, plant, raw, seal


@pytest.fixture(scope="module")
def trained(shared_workspace: Workspace) -> Path:
    return train(shared_workspace.project, "out", "run.max_iters=1").checkpoint(1)


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint that evaluation takes."""
    return Path(shutil.copytree(trained, tmp_path / trained.name))


def reconfigure(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the configuration in a checkpoint's state."""
    state = json.loads((folder / "state.json").read_text())
    change(state["config"])
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)


def said(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of the program, evaluating in this process."""
    command = ["evaluate", "--checkpoint", str(folder), "--nproc-per-node", "1", *arguments]
    with frugal():
        code = main([*command, "--options", "run.device=cpu"])
    captured = capsys.readouterr()
    assert not STEERING.search(captured.err + captured.out)
    return code, captured.err.splitlines()


@pytest.fixture
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Evaluation ends where its workers would begin; their arguments."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    launched: list[Any] = []
    monkeypatch.setattr(evaluate, "launch", lambda _worker, arguments, _how: launched.append(arguments) or 0)
    return launched


def model(**changes: Any) -> Callable[[dict], object]:
    return lambda c: c["model"].update(changes)


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


CONFIGS: dict[str, Callable[[dict], object]] = {
    "trust_remote_code in the model": lambda c: c["model"].update(trust_remote_code=True),
    "trust_remote_code in the run": lambda c: c["run"].update(trust_remote_code=True),
    "trust_remote_code among datasets": lambda c: c["datasets"].update(trust_remote_code=True),
    "trust_remote_code": lambda c: c.update(trust_remote_code=True),
    "trust_remote_code in the dataset": lambda c: c["datasets"]["tiny"].update(trust_remote_code=True),
    "trust_remote_code in the runner": lambda c: c["run"].update(runner={"name": "ddp", "trust_remote_code": True}),
    "auto_map": model(auto_map={"AutoModel": "evil.Model"}),
    "no configuration": lambda c: c.clear(),
    "a model in another folder": model(arch="../../evil"),
    "a model of control characters": model(arch="\x1b[2J\nerror: all is well"),
    "a model that is a list": model(arch=[1]),
    "a key of control characters": model(**{"\x1b[2J\n": 1}),
    "a key of any length": model(**{"x" * 10**6: 1}),
    "half a character": model(arch="\ud800"),
    "a value nested too deep": model(n_layer=nested(800)),
    "a billion layers": model(n_layer=10**9),
    "a negative number of layers": model(n_layer=-1),
    "another number of layers": model(n_layer=1),
    "a billion columns": model(n_embd=10**9),
    "as many positions as never were": model(n_positions=10**15),
    "as many words as never were": model(vocab_size=10**15),
    "more words than fit a number": model(vocab_size=10**25),
    "no heads": model(n_head=0),
    "a share that is not a number": lambda c: c["datasets"]["tiny"].update(split=[float("nan"), 1, 1]),
    "a sample that never ends": lambda c: c["datasets"]["tiny"].update(seq_length=10**18),
    "data at no path": lambda c: c["datasets"]["tiny"].update(path="\x1b[2J\n\0"),
    "an environment variable": lambda c: c["datasets"]["tiny"].update(path="${oc.env:SECRET}"),
    "plugins that are a number": lambda c: (c["run"].update(plugins=7), model(arch="trap")(c)),
    "plugins of a shell": lambda c: (c["run"].update(plugins=["]; touch ~/sprung"]), model(arch="trap")(c)),
    "plugins of control characters": lambda c: (c["run"].update(plugins=["\x1b[2J\n"]), model(arch="trap")(c)),
}  # fmt: skip


@pytest.mark.parametrize("attack", CONFIGS)
def test_a_configuration_that_asks_for_too_much_is_refused(
    copied: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    nothing_launched: list[Any],
    attack: str,
) -> None:
    monkeypatch.setenv("SECRET", "swordfish")
    reconfigure(copied, CONFIGS[attack])
    code, lines = said(capsys, copied)
    assert code == 1
    assert not nothing_launched
    notes, last = [line for line in lines if not line.startswith("error: ")], lines[-1]
    assert last.startswith("error: ")
    assert len(notes) == attack.startswith("plugins")
    assert "swordfish" not in last
    if attack == "plugins of a shell":  # whoever trusts the folder may paste what is printed
        assert notes[0].endswith("--options 'run.plugins=[]; touch ~/sprung]'")
    assert len(last) < 5000


def test_a_checkpoint_does_not_say_how_many_processes_start(
    copied: Path, capsys: pytest.CaptureFixture[str], nothing_launched: list[Any]
) -> None:
    reconfigure(copied, lambda c: c["run"].update(num_workers=10**6))
    assert said(capsys, copied) == (0, [])
    assert nothing_launched[0][0]["run"]["num_workers"] == os.cpu_count()


@pytest.mark.slow
@FEW
@given(st.data())
def test_any_change_of_the_configuration_is_refused_or_harmless(
    copied: Path, trained: Path, nothing_launched: list[Any], data: st.DataObject
) -> None:
    state = json.loads((trained / "state.json").read_text())
    state["config"] = mutated(state["config"], data)
    (copied / "state.json").write_text(json.dumps(state))
    seal(copied)
    command = ["evaluate", "--checkpoint", str(copied), "--nproc-per-node", "1", "--options", "run.device=cpu"]
    assert main(command) in (0, 1)


def test_names_in_a_safetensors_file_do_not_steer_the_terminal(
    copied: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = copied / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(raw({"\x1b[2J\nerror: all is well": entry("F32", [1], 4, 0)}, bytes(size)))
    seal(copied)
    code, lines = said(capsys, copied)
    assert code == 1
    assert len(lines) == 1
    assert "invalid offset for tensor `\\x1b[2J" in lines[0]


def test_a_log_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(tmp_path / "log.txt", quiet=False)
    log.warning("damaged: %s\n\tnext line, naïve ☃", "\x1b]0;title\x07\ud800\r")
    expected = "damaged: \\x1b]0;title\\x07\\ud800\\r\n\tnext line, naïve ☃\n"
    assert capsys.readouterr().out == expected
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith(expected)


# ---- the tokenizer, which transformers opens

EVIL = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).touch()
class Evil(PreTrainedTokenizerFast):
    pass
"""


def remote_code(folder: Path, marker: Path, tokenizer_class: str) -> None:
    """What asks transformers to import a file of the folder."""
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    mapped = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}}
    for name in ("tokenizer_config.json", "config.json"):
        config = json.loads((folder / name).read_text()) | mapped | {"trust_remote_code": True}
        (folder / name).write_text(json.dumps(config | {"tokenizer_class": tokenizer_class, "model_type": "evil"}))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_a_pickled_tokenizer_is_not_opened(copied: Path, tmp_path: Path, name: str, form: str) -> None:
    plant(copied / name, tmp_path / "exploded", form)
    for other in ("vocab.json", "vocab.txt", "tokenizer.pkl", "pytorch_model.bin"):
        plant(copied / other, tmp_path / "exploded", form)
    with suppress(CheckpointError):  # config.json says nothing that a tokenizer needs
        open_tokenizer(copied)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "Evil"])
def test_a_tokenizer_brings_no_code(copied: Path, tmp_path: Path, tokenizer_class: str) -> None:
    remote_code(copied, tmp_path / "exploded", tokenizer_class)
    with suppress(CheckpointError):  # a class that transformers has is used in its place
        open_tokenizer(copied)
    assert not (tmp_path / "exploded").exists()


def stranger(folder: Path) -> None:
    """A tokenizer whose ids are beyond the model's."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {token: i + 1000 for token, i in tokenizer["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


PROCESSES: dict[str, Callable[[Path, Path], object]] = {
    "a pickled manifest": lambda folder, marker: plant(folder / "manifest.json", marker, "pickle"),
    "a pickled tokenizer": lambda folder, marker: plant(folder / "tokenizer.json", marker, "pickle"),
    "a tokenizer with code": lambda folder, marker: remote_code(folder, marker, "Evil"),
    "another tokenizer": lambda folder, marker: stranger(folder),
}


@pytest.mark.parametrize("attack", PROCESSES)
def test_the_program_says_one_sentence_and_executes_nothing(copied: Path, tmp_path: Path, attack: str) -> None:
    PROCESSES[attack](copied, tmp_path / "exploded")
    if attack != "a pickled manifest":
        seal(copied)
    run = program(tmp_path, "evaluate", "--checkpoint", str(copied), "--generate", "ban ", "--max-new-tokens", "2")
    assert run.code == 1, run.out + run.err
    assert [line for line in run.err.splitlines() if line.startswith("error: ")] == run.err.splitlines()[-1:]
    assert "Traceback" not in run.err + run.out
    assert not (tmp_path / "exploded").exists()
