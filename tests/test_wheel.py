"""A wheel carries plugins, configurations and projects, and works from any directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT, copy_source
from fixtures_docs import blocks


@pytest.mark.slow
def test_a_wheel_trains_from_any_directory(tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    source = copy_source(tmp_path / "source")
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


def test_a_verb_comes_with_the_wheel_of_a_third_party(tmp_path: Path) -> None:
    """The verb that ARCHITECTURE.md shows, in a package of its own with an entry point."""
    (verb,) = [b.text for b in blocks("python", page=ROOT / "ARCHITECTURE.md") if "register_command" in b.text]
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "hello_verb.py").write_text(verb)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "hello-verb"\nversion = "1"\n'
        '[project.entry-points."crosstrain.plugins"]\nhello = "hello_verb"\n'
        '[tool.setuptools]\npy-modules = ["hello_verb"]\n'
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(target), str(source)], check=True, timeout=200)
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(target), str(ROOT / "platform")])}
    for arguments, said in ((["hello", "Ada"], "Hello, Ada!"), (["--help"], "Greet somebody")):
        done = subprocess.run(
            [sys.executable, "-m", "crosstrain", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
