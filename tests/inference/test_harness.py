"""lm-evaluation-harness over a checkpoint: in place under any runner, and over the exported folder."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenWriter, best_dtype

from conftest import ENVIRONMENT, ROOT, Run
from crosstrain.cli.main import main
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.engine.build import build_model, make_runner
from crosstrain.inference.encoding import open_tokenizer
from crosstrain.inference.open_checkpoint import saved_config
from crosstrain.utils.errors import UserError
from crosstrain.utils.optional_deps import require
from fixtures_ranks import run_ranks, train
from fixtures_server import loaded

LENGTH, SAMPLES = 32, 20
TASKS = ["flow", "next", "goes_on"]
harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval")


def subject(runner: Any, tokenizer: Any) -> Any:
    from crosstrain_plugins.builtin.evaluations.tasks.lm_eval_harness import HarnessModel

    return HarnessModel(runner, tokenizer, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """A project, a text of a whole number of samples, and task files about it."""
    folder = tmp_path_factory.mktemp("harness")
    tokenizer = load_tokenizer(dataset / "tokenizer")
    text = json.loads((dataset.parent / "text.jsonl").read_text().splitlines()[0])["text"] * 20
    ids = tokenizer.encode(text)
    while len(ids) % LENGTH or len(ids) > LENGTH * SAMPLES:
        text = text[:-1]
        ids = tokenizer.encode(text)
    # Behind the end of another text, as the harness reads it.
    with TokenWriter(folder / "tokens", best_dtype(tokenizer.vocab_size)) as writer:
        writer.add([[tokenizer.end_id, *ids]])
    model = {
        "arch": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": LENGTH, "dropout": 0.0,
        "vocab_size": tokenizer.vocab_size,
    }  # fmt: skip
    run = {
        "runner": "ddp", "max_iters": 20, "global_batch_size": 4, "init_lr": 1e-2, "device": "cpu", "log_interval": 10,
    }  # fmt: skip
    source = {"path": str(folder / "tokens"), "tokenizer": str(dataset / "tokenizer")}
    text_data = {"name": "text", "seq_length": LENGTH, "split": [1, 0, 0]} | source
    config = {"model": model, "datasets": {"text": text_data}, "run": run}
    (folder / "project.yaml").write_text(yaml.safe_dump(config))
    tasks = folder / "tasks"
    tasks.mkdir()
    write_task(
        tasks,
        "flow",
        [{"text": text}],
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
        },
    )
    words = text.split()
    questions = [
        {"text": " ".join(words[i : i + 6]), "choices": [words[i + 6], "zzz", "qqq"], "answer": 0}
        for i in range(0, 80, 8)
    ]
    write_task(
        tasks,
        "next",
        questions,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}],
        },
    )
    write_task(
        tasks,
        "goes_on",
        questions,
        {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": [" ", "\n"], "max_gen_toks": 6, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    )
    return folder


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], more: dict[str, Any]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | source | more))


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    return train(place / "project.yaml", "out")


def evaluated(place: Path, run: Run) -> dict[str, Any]:
    """What `evaluate.py` writes of every task, and of the split that holds the same text."""
    program = [sys.executable, str(ROOT / "evaluate.py"), "--checkpoint", str(run.folder), "--output", "found.json"]
    done = subprocess.run(
        [*program, "--task-path", "tasks", "--tasks", *TASKS, "--splits", "train"],
        cwd=place,
        env=ENVIRONMENT | offline(place),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((place / "found.json").read_text()) | {"said": done.stdout}


@pytest.fixture(scope="module")
def found(place: Path, run: Run) -> dict[str, Any]:
    return evaluated(place, run)


def offline(place: Path) -> dict[str, str]:
    return {
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(place / "cache"),
        "XDG_CACHE_HOME": str(place / "cache"),
    }


@harness
@pytest.mark.slow
def test_the_harness_finds_the_perplexity_that_evaluation_finds(place: Path, found: dict[str, Any]) -> None:
    nats = found["tasks"]["flow"]["bits_per_byte,none"] * math.log(2)
    text = json.loads((place / "tasks" / "flow.jsonl").read_text())["text"]
    split = found["splits"]["train"]
    # The same tokens in the same windows: only the order of fp32 sums differs.
    assert nats * len(text.encode()) == pytest.approx(split["loss"] * split["tokens"], rel=1e-5)
    assert found["tasks"]["next"]["acc,none"] == 1.0, "words that are not of this language are unlikely"
    assert 0 <= found["tasks"]["goes_on"]["exact_match,none"] <= 1
    assert re.search(r"next \| acc 1", found["said"])


@harness
@pytest.mark.slow
def test_a_second_evaluation_knows_the_log_likelihoods(place: Path, run: Run, found: dict[str, Any]) -> None:
    again = evaluated(place, run)
    assert re.search(r"(\d+) of \1 requests are known from an earlier evaluation", again["said"])
    assert again["tasks"] == found["tasks"]


def on_ranks(checkpoint: str, folder: str, runner: str) -> dict[str, Any]:
    """Tasks on however many ranks this is run."""
    from crosstrain_plugins.builtin.evaluations.tasks.lm_eval_harness import run_tasks

    os.environ |= offline(Path(folder))
    config = saved_config(Path(checkpoint), [f"run.runner={runner}"])
    made = make_runner(config)
    made.setup()
    build_model(config, made, Path(checkpoint), for_training=False)
    tokenizer = open_tokenizer(Path(checkpoint))
    results = run_tasks(subject(made, tokenizer), TASKS, f"{folder}/tasks", None)
    made.close()
    return results


@harness
@pytest.mark.slow
@pytest.mark.parametrize("runner", ["ddp", "fsdp", "megatron_tp2"])
def test_every_rank_finds_the_same(place: Path, run: Run, found: dict[str, Any], runner: str) -> None:
    for shared in run_ranks(2, on_ranks, str(run.checkpoint(20)), str(place), runner, seconds=250):
        for name, metrics in found["tasks"].items():
            for key, value in metrics.items():
                # Sums in another order.
                assert shared[name][key] == pytest.approx(value, rel=1e-4), (name, key)


@harness
@pytest.mark.slow
def test_the_exported_folder_runs_under_the_harness_as_any_model(place: Path, run: Run, found: dict[str, Any]) -> None:
    exported = place / "exported"
    program = [sys.executable, "-m", "crosstrain", "export", "--checkpoint", str(run.folder), "--output", str(exported)]
    subprocess.run(program, env=ENVIRONMENT, check=True, capture_output=True)
    code = f"""
import json, lm_eval
from lm_eval.tasks import TaskManager
found = lm_eval.simple_evaluate(
    "hf", {{"pretrained": {str(exported)!r}, "device": "cpu", "dtype": "float32", "max_length": {LENGTH}}},
    tasks={TASKS!r}, task_manager=TaskManager(include_path={str(place / "tasks")!r}),
)
numbers = {{name: {{k: v for k, v in m.items() if isinstance(v, float)}} for name, m in found["results"].items()}}
print(json.dumps(numbers))
"""
    environment = ENVIRONMENT | offline(place)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for name, metrics in json.loads(done.stdout.splitlines()[-1]).items():
        for key, value in metrics.items():
            if "stderr" not in key:
                # Two forms of the same activation function, in fp32.
                assert found["tasks"][name][key] == pytest.approx(value, rel=1e-4), (name, key)


@harness
@pytest.mark.slow
def test_tasks_that_are_not_there_are_named(place: Path, run: Run) -> None:
    from crosstrain_plugins.builtin.evaluations.tasks.lm_eval_harness import run_tasks

    checkpoint = run.checkpoint(20)
    runner = loaded(checkpoint)[1]
    for task, folder, complaint in (
        ("nxt", "tasks", r"the harness has no task nxt; did you mean next\?"),
        ("next", "nowhere", "nowhere is not a folder"),
    ):
        tokenizer = open_tokenizer(checkpoint)
        with pytest.raises(UserError, match=complaint):
            run_tasks(subject(runner, tokenizer), [task], str(place / folder), None)


@pytest.mark.slow
def test_a_folder_of_tasks_alone_is_a_mistake(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--checkpoint", str(run.folder), "--task-path", "tasks"]) == 1
    assert "--task-path: needs --tasks with the names" in capsys.readouterr().err


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else found(name, *a))
    with pytest.raises(UserError, match=r"--tasks needs the package lm_eval.*crosstrain\[eval\]"):
        require("lm_eval", "--tasks")
