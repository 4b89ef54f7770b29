"""Thousands of project files with mistakes: each is refused in sentences, or keeps the documented bounds."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT, Workspace
from crosstrain.config.load import Config, load_config
from crosstrain.training.preflight import preflight
from crosstrain.utils.errors import UserError, sentence
from fixtures_config import ROWS
from fixtures_mistakes import bases, mutate

LONGEST = 10.0  # seconds of this process's time for one file


def limits(said: str) -> tuple[float, bool, float, bool] | None:
    """The interval that a documented type names: lowest, whether it is inside, highest, whether it is inside."""

    def number(text: str) -> float:
        base, _, power = text.partition("^")
        return float(base) ** float(power) if power else float(base)

    if found := re.search(r"in ([\[(])([^,]+), ([^\])]+)([\])])", said):
        return number(found[2]), found[1] == "[", number(found[3]), found[4] == "]"
    if found := re.search(r"([≥>]) (\S+)", said):
        return number(found[2]), found[1] == "≥", math.inf, False
    return (-math.inf, False, math.inf, False) if "number" in said else None


def out_of_bounds(config: Config) -> list[str]:
    """Keys of an accepted configuration whose values are not what docs/configuration.md allows."""
    plain, run = config.plain, config.plain["run"]
    sections = [run, run["amp"], run["on_bad_step"], run["curriculum"], run["profile"]]
    names = ["RunOptions", "AmpOptions", "BadStepOptions", "CurriculumOptions", "ProfileOptions"]
    where = dict(zip(names, sections, strict=True))
    where |= {str((kind, run[kind]["name"])): run[kind] for kind in ("runner", "optimizer")}
    where |= {str(("dataset", d["name"])): d for d in plain["datasets"].values()}
    wrong = []
    for table, key, said, _ in ROWS:
        value = (where.get(getattr(table, "__name__", str(table))) or {}).get(key)
        allowed = limits(said)
        for item in value if isinstance(value, list) else [value]:
            if allowed is None or not isinstance(item, (int, float)) or isinstance(item, bool):
                continue
            low, low_in, high, high_in = allowed
            inside = (low < item or (low_in and low == item)) and (item < high or (high_in and item == high))
            if not inside or not math.isfinite(item):
                wrong.append(f"{key}: {item} is not {said}")
    return wrong


def attempt(data: bytes, path: Path) -> bool:
    """Whether the file is accepted; fails if it is wrongly so, or refused with anything but sentences, or slow."""
    path.write_bytes(data)
    started = time.process_time()
    sentences: list[str] = []
    try:
        config = load_config(path)
        preflight(config, 1)
    except UserError as error:
        sentences = error.sentences
    assert time.process_time() - started < LONGEST
    assert all(sentence(text) and "Traceback" not in text for text in sentences)
    assert sentences or not out_of_bounds(config)
    return not sentences


def try_many(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    monkeypatch.chdir(workspace.path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a text may be taken for a name there
    good = bases(workspace)
    accepted = 0
    for seed in seeds:
        rng = random.Random(seed)
        data = mutate(rng.choice(good), rng)
        try:
            accepted += attempt(data, workspace.path / "mutant.yaml")
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n{data[:3000]!r}") from error
    print(f"{len(seeds)} files, {accepted} accepted")
    assert 0 < accepted < len(seeds) / 2  # mistakes, and not only unreadable files


def test_a_hundred_files_with_mistakes(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    try_many(workspace, monkeypatch, range(100))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_files_with_mistakes(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    try_many(workspace, monkeypatch, range(1000, 11_000))


SERVER = """
import os, sys
from pathlib import Path
import crosstrain.training.worker  # this and the next: every command line would import them anew
import crosstrain_plugins.builtin.commands.plan.plan
from crosstrain.cli.main import main
from crosstrain.config.load import load_config
for runner in ("ddp", "zero2"):
    load_config(sys.argv[1], [f"run.runner={runner}", "run.optimizer=sgd"])
for line in sys.stdin:
    if (child := os.fork()) == 0:
        out = os.open(line.strip() + ".out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        import signal; signal.alarm(60)
        try:
            code = main(["train", "--dry-run", "--cfg-path", line.strip()])
        except BaseException:
            import traceback; traceback.print_exc(); code = 99
        sys.stdout.flush(); sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def judge(code: int, said: str, seed: int) -> None:
    assert code in (0, 1), f"seed {seed}: exit code {code}\n{said[-3000:]}"
    assert "Traceback" not in said, f"seed {seed}\n{said[-3000:]}"
    if code == 1:
        assert "error: " in said, f"seed {seed}\n{said[-3000:]}"


def written(workspace: Workspace, seeds: range) -> list[tuple[int, Path]]:
    good = bases(workspace)
    found = []
    for seed in seeds:
        rng = random.Random(seed)
        path = workspace.path / f"mutant{seed}.yaml"
        path.write_bytes(mutate(rng.choice(good), rng))
        found.append((seed, path))
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_command_lines(workspace: Workspace) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(workspace.project)],
        cwd=workspace.path,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    for seed, path in written(workspace, range(20_000, 20_500)):
        print(path, file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        judge(code, Path(f"{path}.out").read_text(errors="replace"), seed)
    server.stdin.close()
    assert server.wait(60) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_real_processes(workspace: Workspace) -> None:
    for seed, path in written(workspace, range(30_000, 30_050)):
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), "--cfg-path", str(path), "--options", "run.max_iters=1"],
            cwd=workspace.path,
            capture_output=True,
            text=True,
            timeout=120,
            env=ENVIRONMENT,
        )
        judge(done.returncode, done.stdout + done.stderr, seed)
