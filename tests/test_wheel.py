"""A wheel carries plugins, configurations and projects, and works from any directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import ENVIRONMENT, ROOT


def test_a_wheel_trains_from_any_directory(tmp_path: Path) -> None:
    source, target, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    ignore = shutil.ignore_patterns(".git", ".venv", "output", "data", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=lambda d, names: ignore(d, names) if Path(d) == ROOT else [])
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=200)
    (wheel,) = tmp_path.glob("crosstrain-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=200)
    elsewhere.mkdir()

    text = elsewhere / "text.txt"
    text.write_text("a word and another word, again and again. " * 3000)
    options = [
        "run.max_iters=2", "run.eval_interval=null", "datasets.stdlib.prepare.input=text.txt", "model.n_layer=1",
        "datasets.stdlib.prepare.separator='. '", "datasets.stdlib.prepare.train_tokenizer=300", "model.vocab_size=300",
    ]  # fmt: skip
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "crosstrain", "train", "--cfg-path", "projects/quickstart.yaml", "--options", *options],
        cwd=elsewhere,
        env=environment | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "output" / "quickstart" / "checkpoints" / "step_000002" / "config.json").exists()
    subprocess.run(
        [sys.executable, "-m", "crosstrain", "report", "output/quickstart", "--output", "page.html"],
        cwd=elsewhere,
        env=environment | {"PYTHONPATH": str(target)},
        check=True,
    )
    for kind in ("package", "project"):
        subprocess.run(
            [sys.executable, "-m", "crosstrain", "new", kind, "mine"],
            cwd=elsewhere,
            env=environment | {"PYTHONPATH": str(target)},
            check=True,
        )
    assert (elsewhere / "mine" / ".github" / "workflows" / "test.yml").exists()
    assert (elsewhere / "crosstrain.schema.json").exists()
    listed = subprocess.run(
        [sys.executable, "-m", "crosstrain", "list", "runner"],
        cwd=elsewhere,
        env=environment | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(target / "crosstrain" / "plugins" / "runners" / "ddp.py") in listed.stdout
    assert os.fspath(ROOT) + os.sep not in listed.stdout
