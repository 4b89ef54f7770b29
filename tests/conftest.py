"""A tiny dataset and a tiny GPT-2, and the program run as its users run it: as processes."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from fixtures_processes import Program

pytest_plugins = ["fixtures_bucket", "fixtures_nodes"]

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def write_text(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """Documents of a made-up language with plenty to learn: a few words, some following others more often."""
    rng = random.Random(seed)
    words = [f"{a}{b}" for a in ("ba", "de", "ki", "lo", "mu") for b in ("n", "r", "s", "t")]
    follow = {word: rng.sample(words, 3) for word in words}
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(documents):
            text = [rng.choice(words)]
            while len(text) < 120:
                text.append(rng.choice(follow[text[-1]]))
            file.write(json.dumps({"text": " ".join(text)}) + "\n")
    return path


def copy_source(target: Path) -> Path:
    """Copy what belongs to the project, without environments, outputs and caches of this tree."""
    ignore = shutil.ignore_patterns(".git", ".venv", "output", "data", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, target, ignore=lambda d, names: ignore(d, names) if Path(d) == ROOT else [])
    return target


def json_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    """A file of JSON lines with these texts."""
    path.write_text("".join(json.dumps({key: text, "url": "u"}) + "\n" for text in texts))
    return path


TEXTS = [
    "the cat sat on the mat, and the mat sat still",
    "naïve café — ☃ 雪だるま 🎉",
    "x <|endoftext|> y\r\n\ttail",
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a byte-level BPE of 300 ids, trained on TEXTS."""
    from crosstrain_plugins.builtin.commands.prepare.train_bpe import train_bpe

    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_bpe(TEXTS * 2, 300).save(folder)
    return folder


@pytest.fixture(autouse=True)
def _logging() -> None:
    """Undo what an earlier run in this process did to the logger, so that `caplog` sees records."""
    log = logging.getLogger("crosstrain")
    log.handlers[:], log.level, log.propagate = [], logging.NOTSET, True


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset with its own tokenizer of 320 ids."""
    from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
    from crosstrain_plugins.builtin.commands.prepare.prepare import prepare

    folder = tmp_path_factory.mktemp("data")
    text = write_text(folder / "text.jsonl")
    prepare(PrepareOptions(input=str(text), train_tokenizer=320), folder / "tiny", progress=False)
    return folder / "tiny"


@dataclass
class Run:
    """A run's folder and what its last command said."""

    folder: Path
    out: str = ""
    err: str = ""
    code: int = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def column(self, key: str) -> list[Any]:
        return [row[key] for row in self.rows]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:06d}"


class Workspace:
    """A directory with a project file for a tiny GPT-2, and the program run in it."""

    def __init__(self, path: Path, dataset: Path) -> None:
        self.path = path
        self.config = {
            "model": {
                "arch": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 320,
                "dropout": 0.1,
            },
            "datasets": {"tiny": {"name": "text", "path": str(dataset), "seq_length": 32, "split": [80, 10, 10]}},
            "run": {
                "runner": "ddp", "output_dir": "out", "max_iters": 20, "global_batch_size": 8, "micro_batch_size": 4,
                "init_lr": 1e-2, "weight_decay": 0.1, "log_interval": 1, "device": "cpu",
            },
        }  # fmt: skip
        self.project = path / "project.yaml"
        self.project.write_text(yaml.safe_dump(self.config))

    def command(self, *options: str, nproc: int = 1, flags: tuple[str, ...] = ()) -> list[str]:
        chosen = ["--options", *options] if options else []
        return [
            sys.executable,
            str(ROOT / "train.py"),
            "--cfg-path",
            str(self.project),
            "--nproc-per-node",
            str(nproc),
            *flags,
            *chosen,
        ]

    def train(
        self,
        name: str,
        *options: str,
        nproc: int = 1,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        fails: bool = False,
    ) -> Run:
        command = self.command(f"run.output_dir={name}", *options, nproc=nproc, flags=flags)
        done = subprocess.run(
            command, cwd=self.path, env=ENVIRONMENT | (env or {}), capture_output=True, text=True, timeout=240
        )
        assert fails or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return Run(self.path / name, done.stdout, done.stderr, done.returncode)

    def start(self, name: str, *options: str, nproc: int = 1) -> subprocess.Popen[str]:
        """Start a training and return at once; its session can be killed whole."""
        return subprocess.Popen(
            self.command(f"run.output_dir={name}", *options, nproc=nproc),
            cwd=self.path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def evaluate(self, *arguments: str) -> Run:
        done = subprocess.run(
            [sys.executable, str(ROOT / "evaluate.py"), *arguments],
            cwd=self.path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=240,
        )
        return Run(self.path, done.stdout, done.stderr, done.returncode)


@pytest.fixture
def workspace(tmp_path: Path, dataset: Path) -> Workspace:
    return Workspace(tmp_path, dataset)


@pytest.fixture(scope="module")
def shared_workspace(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Workspace:
    """For modules whose tests compare the same runs."""
    return Workspace(tmp_path_factory.mktemp("shared"), dataset)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | Program, seconds: float = 120) -> None:
    """Poll until `condition` holds; fails if the process ends first."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def kill(process: subprocess.Popen[str] | Program) -> None:
    """SIGKILL for the process, the head of a session, and all it started."""
    kill_session(process)
    process.wait()


def kill_session(process: subprocess.Popen[str] | Program | BaseProcess) -> None:
    for pid in session(process):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def session(process: subprocess.Popen[str] | Program | BaseProcess) -> list[int]:
    """The processes of the session that the process is the head of."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(ProcessLookupError):
            found += [pid] if os.getsid(pid) == process.pid else []
    return found


def logged_step(folder: Path) -> int:
    """The newest step in a run's metrics.jsonl, 0 before there is one."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes' tokenizer, of whole words."""
    from fixtures_shards import module_of

    folder = tmp_path_factory.mktemp("words")
    module_of("shapes").write_tokenizer(folder)
    return folder / "tokenizer"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where nothing is yet, indexes of shards neither."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="session")
def speaker(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """A checkpoint of a tiny GPT-2 whose every id has text."""
    from fixtures_ranks import train

    workspace = Workspace(tmp_path_factory.mktemp("speaker"), dataset)
    sizes = ("model.n_positions=128", "model.vocab_size=303", "run.max_iters=30")
    return train(workspace.project, "speaker", *sizes).checkpoint(30)
