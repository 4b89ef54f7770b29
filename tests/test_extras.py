"""The core alone trains, and each extra installs beside it in an environment of its own, where its verbs work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT, copy_source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

_OPTIONS = [
    "run.max_iters=2", "run.eval_interval=null", "datasets.stdlib.prepare.input=text.txt", "model.n_layer=1",
    "datasets.stdlib.prepare.separator='. '", "datasets.stdlib.prepare.train_tokenizer=300", "model.vocab_size=300",
]  # fmt: skip
_TRAIN = ["train", "--cfg-path", "projects/quickstart.yaml", "--options", *_OPTIONS]
_PREPARE = ["prepare", "--train-tokenizer", "300", "--output", "corpus", "--workers", "1"]
_SCRIPT = (
    "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\\n  --lr 1e-3\n"
)
_PARQUET = (
    "import pyarrow, pyarrow.parquet;"
    "pyarrow.parquet.write_table(pyarrow.table({'text': ['a word and more'] * 90}), 'rows.parquet')"
)


class Place:
    """An environment, and a folder with a trained checkpoint in which its commands run."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.python, self.folder = str(environment / "bin" / "python"), folder
        self.env = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.python, *arguments], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def crosstrain(self, *arguments: str) -> str:
        return self.run("-m", "crosstrain", *arguments)

    def serve(self) -> None:
        """Start a server, ask it for its health, and stop it."""
        command = [self.python, "-m", "crosstrain", "serve", "--checkpoint", "output/quickstart", "--port", "0"]
        with open(self.folder / "serve.log", "w") as log:
            server = subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while " on http" not in (text := (self.folder / "serve.log").read_text()):
                assert server.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(0.2)
            address = text.partition(" on ")[2].split(";")[0]
            assert urllib.request.urlopen(f"{address}/health", timeout=30).status == 200
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """An environment with the package and no extra, and a run of the quickstart in it."""
    folder = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)
    (folder / "work").mkdir()
    (folder / "work" / "text.txt").write_text("a word and another word, again and again. " * 3000)
    place = Place(folder / "environment", folder / "work")
    place.run("-m", "pip", "install", "-q", str(copy_source(folder / "source")))
    place.crosstrain(*_TRAIN)
    return place


def beside(core: Place, extra: str, tmp_path: Path) -> Place:
    """A copy of the core's environment with an extra, and of its folder. Files are links until pip replaces them."""
    environment, work = core.folder.parent / "environment", tmp_path / "work"
    shutil.copytree(environment, tmp_path / "environment", symlinks=True, copy_function=os.link)
    shutil.copytree(core.folder, work)
    place = Place(tmp_path / "environment", work)
    place.run("-m", "pip", "install", "-q", f"{core.folder.parent / 'source'}[{extra}]")
    return place


def test_the_core_alone_trains_and_its_verbs_work(core: Place) -> None:
    assert (core.folder / "output" / "quickstart" / "checkpoints" / "step_000002" / "config.json").exists()
    installed = core.run("-m", "pip", "list", "--format", "freeze")
    for package in ("starlette", "plotly", "timm", "peft", "trafilatura", "deepspeed", "pyarrow"):
        assert f"\n{package}==" not in installed
    core.crosstrain("evaluate", "--checkpoint", "output/quickstart")
    core.crosstrain("export", "--checkpoint", "output/quickstart", "--output", "exported")
    core.crosstrain("samples", "--cfg-path", "projects/quickstart.yaml", "--options", *_OPTIONS)
    core.crosstrain("plan", "--cfg-path", "projects/quickstart.yaml", "--options", *_OPTIONS)
    core.crosstrain("status", "output")
    core.crosstrain("schema")
    core.crosstrain("list")
    core.crosstrain("new", "project", "mine")
    core.crosstrain(*_PREPARE, "--input", "text.txt")
    shutil.rmtree(core.folder / "corpus")  # other tests copy the folder


def test_every_extra_is_tried() -> None:
    """By a test of this file, or because its package needs a service or another machine."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    elsewhere = {"s3", "gcs", "azure", "ray", "wandb", "mlflow", "eval", "float8", "offload"}
    assert extras.keys() == {"corpus", "serve", "report", "parquet", "adapters", "vision", "deepspeed"} | elsewhere | {
        "all", "test", "docs", "bench",
    }  # fmt: skip


def test_corpus(core: Place, tmp_path: Path) -> None:
    place = beside(core, "corpus", tmp_path)
    for number in range(3):
        words = " ".join(f"word{number}x{n}" for n in range(80))
        (place.folder / f"page{number}.html").write_text(f"<html><body><article><p>{words}</p></article></body></html>")
    near = ["dedup.near.threshold=0.8"]
    said = place.crosstrain(*_PREPARE, "--input", "page0.html", "page1.html", "page2.html", "--options", *near)
    assert "3" in said or (place.folder / "corpus" / "corpus.json").exists()


def test_serve(core: Place, tmp_path: Path) -> None:
    beside(core, "serve", tmp_path).serve()


def test_report(core: Place, tmp_path: Path) -> None:
    place = beside(core, "report", tmp_path)
    place.crosstrain("report", "output/quickstart", "--output", "page.html")
    assert "<svg" in (place.folder / "page.html").read_text() or "plotly" in (place.folder / "page.html").read_text()
    (place.folder / "pretrain.sh").write_text(_SCRIPT)
    place.crosstrain("migrate", "pretrain.sh")
    assert "n_layer: 2" in (place.folder / "project.yaml").read_text()


def test_parquet(core: Place, tmp_path: Path) -> None:
    place = beside(core, "parquet", tmp_path)
    place.run("-c", _PARQUET)
    place.crosstrain(*_PREPARE, "--input", "rows.parquet")


@pytest.mark.parametrize(
    ("extra", "options"),
    [("deepspeed", ["run.runner=zero2"]), ("adapters", ["model.adapter={name: lora, rank: 4}"])],
)
def test_an_extra_of_training(core: Place, tmp_path: Path, extra: str, options: list[str]) -> None:
    place = beside(core, extra, tmp_path)
    place.crosstrain(*_TRAIN, *options, "run.output_dir=output/other")
    assert (place.folder / "output" / "other" / "checkpoints" / "step_000002").exists()


def test_vision(core: Place, tmp_path: Path) -> None:
    place = beside(core, "vision", tmp_path)
    options = [
        "run.max_iters=1",
        "run.warmup_steps=0",
        "run.eval_interval=null",
        "datasets.shapes.images=64",
        "run.global_batch_size=2",
    ]
    place.crosstrain("train", "--cfg-path", "projects/blip2_qwen_shapes.yaml", "--options", *options)
