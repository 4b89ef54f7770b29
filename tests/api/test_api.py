"""The Python interface: it agrees with the command line, and works from any script and any notebook."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import crosstrain
from conftest import ENVIRONMENT, ROOT, Workspace, logged_step, wait_until
from crosstrain.cli.main import main
from crosstrain.data.loader import evaluation_batches
from crosstrain.data.splits import open_split
from crosstrain.utils.errors import CheckpointError, ConfigError, UserError
from fixtures_ranks import train

PLAIN = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")}


def test_a_dict_is_a_project_as_a_file_is(workspace: Workspace) -> None:
    texts = ["run.seed=7", "run.optimizer={name: adamw, betas: [0.8, 0.9]}", "run.output_dir=here", "run.runner=zero1"]
    values = {
        "run.seed": 7, "run.optimizer": {"name": "adamw", "betas": (0.8, 0.9)}, "run.output_dir": Path("here"),
        "run.runner": "zero1",
    }  # fmt: skip
    plain = crosstrain.load_config(workspace.project, texts).plain
    assert crosstrain.load_config(workspace.project, values).plain == plain
    workspace.config["run"]["output_dir"] = Path("here")
    assert crosstrain.load_config(workspace.config, values).plain == plain


def test_mistakes_are_the_command_lines_sentences(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({"run.max_iter": 3}, {"run.runner": "dpp"}, {"run.seed": "one"}, {"model.n_embd": 0}):
        texts = [f"{key}={json.dumps(value)}" for key, value in options.items()]
        assert main(["train", "--cfg-path", str(workspace.project), "--options", *texts]) == 1
        with pytest.raises(ConfigError) as raised:
            crosstrain.train(workspace.project, options)
        assert capsys.readouterr().err == f"error: {raised.value}\n"
    workspace.config["run"]["max_iter"] = 3
    with pytest.raises(ConfigError, match=r"^config: run\.max_iter: unknown key; did you mean run\.max_iters"):
        crosstrain.load_config(workspace.config)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        crosstrain.open(workspace.path)


def test_an_opened_model_agrees_with_evaluate(
    speaker: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["evaluate", "--checkpoint", str(speaker), "--nproc-per-node", "1", "--output", str(tmp_path / "out.json")]
    text = ["--generate", "ban ", "--seed", "3", "--max-new-tokens", "12", "--top-k", "20"]
    assert main([*flags, "--splits", "val", *text]) == 0
    said = json.loads((tmp_path / "out.json").read_text())
    generators, before = torch.random.get_rng_state(), set(multiprocessing.active_children())
    with crosstrain.open(speaker) as model:
        text = model.generate("ban ", seed=3, max_new_tokens=12, top_k=20)
        assert [text] == said["completions"][0]["completions"]
        data = open_split(model.config, "val")
        losses = [model.loss(b.data) for b, _ in evaluation_batches(data, len(data), dp_rank=0, dp_size=1)]
        # Sums of fp32 losses over other groups of samples.
        assert losses == [pytest.approx(said["splits"]["val"]["loss"], rel=1e-5)]
        ids = model.encoders.encode("text", "ban ban")
        batch = torch.tensor([[model.tokenizer.eos_token_id, *ids]])
        expected = model.loss({"input_ids": batch[:, :-1], "labels": batch[:, 1:]})
        assert model.loss("ban ban") == pytest.approx(expected)
        with torch.no_grad():
            logits = model.module.lm(batch[:, :-1]).logits[0, :, : model.config.model.options.vocab_size]
        # The loss that never builds all logits adds them up in another order.
        assert torch.nn.functional.cross_entropy(logits, batch[0, 1:]).item() == pytest.approx(expected, rel=1e-5)
        with pytest.raises(UserError, match="chat template"):
            model.chat("ban")
        with pytest.raises(UserError, match="temperature must not be negative"):
            model.generate("ban", temperature=-1.0)
        with pytest.raises(UserError, match="shorten the prompt"):
            model.loss("ban " * 200)
        children = set(multiprocessing.active_children()) - before
        assert children  # that encode
    assert not children & set(multiprocessing.active_children())
    assert torch.equal(torch.random.get_rng_state(), generators)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_hugging_face_folder_opens_as_the_checkpoint_that_it_was_exported_from(
    speaker: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, project = tmp_path / "exported", tmp_path / "project.yaml"
    assert main(["export", "--checkpoint", str(speaker), "--output", str(folder)]) == 0
    text, losses = set(), []
    for place in (speaker, folder):
        with crosstrain.open(place) as model:
            text.add(model.generate("ban ", seed=3, max_new_tokens=12))
            project.write_text(json.dumps(model.config.plain)) if place == speaker else None
        flags = ["--checkpoint", str(place), "--cfg-path", str(project), "--nproc-per-node", "1", "--splits", "val"]
        assert main(["evaluate", *flags, "--output", str(tmp_path / f"{place.name}.json")]) == 0
        losses.append(json.loads((tmp_path / f"{place.name}.json").read_text())["splits"]["val"])
    assert len(text) == 1
    assert losses[0] == losses[1]
    capsys.readouterr()
    assert main(["evaluate", "--checkpoint", str(folder), "--nproc-per-node", "1"]) == 1
    assert capsys.readouterr().err == (
        "error: datasets: none is configured; use --cfg-path with a project file that has one\n"
    )
    with pytest.raises(CheckpointError, match="has no weights called 'ema'"):
        crosstrain.open(folder, weights="ema")
    with crosstrain.open(folder, {"model.pretrained": "elsewhere"}) as model:
        assert model.generate("ban ", seed=3, max_new_tokens=12) in text
    with pytest.raises(ConfigError, match="is not a run of this model"):
        crosstrain.open(folder, ["model.arch=blip2_qwen"])
    (folder / "checkpoints").mkdir()  # of a run, which names its last checkpoint
    with pytest.raises(CheckpointError, match="not a checkpoint, and contains none"):
        crosstrain.open(folder)
    (folder / "checkpoints").rmdir()
    (folder / "model.safetensors").rename(folder / "aside")
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        crosstrain.open(folder)
    (folder / "aside").rename(folder / "model.safetensors")
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"n_positions": 64}))
    with pytest.raises(CheckpointError, match=r"wpe\.weight"):
        crosstrain.open(folder)
    (folder / "config.json").write_text(json.dumps(sizes | {"n_layer": 3}))
    with pytest.raises(CheckpointError, match=r"has no parameter h\.2"):
        crosstrain.open(folder)
    (folder / "state.json").touch()  # a checkpoint whose manifest is lost
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        crosstrain.open(folder)


def test_an_adapters_folder_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')
    with pytest.raises(CheckpointError, match=r"model\.pretrained: base and model\.adapter: {name: lora, pretrained: "):
        crosstrain.open(tmp_path)


def test_a_run_has_its_numbers_and_checkpoints(workspace: Workspace) -> None:
    options = ("run.max_iters=6", "run.eval_interval=2", "run.save_best=true", "run.keep_last=null")
    trained = train(workspace.project, "out", *options)
    run = crosstrain.Run(trained.folder)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in run.metrics] == trained.column("loss")
    best = min(trained.rows[1::2], key=lambda row: row["val_loss"])["step"]
    assert run.best_checkpoint == trained.checkpoint(best)
    assert run.latest_checkpoint == trained.checkpoint(6)
    crosstrain.report([run.folder], workspace.path / "report.html")
    assert "<h" in (workspace.path / "report.html").read_text()
    nothing = crosstrain.Run(workspace.path)
    assert nothing.latest_checkpoint is nothing.best_checkpoint is None
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        _ = nothing.metrics


def test_a_plan_is_the_command_lines(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--world-size", "4", "--device-memory", "1MiB", "--tokens", "1M", "--no-presets"]
    options = ["run.runner=zero2", "run.micro_batch_size=1"]
    output = workspace.path / "plan.json"
    command = ["plan", "--cfg-path", str(workspace.project), *flags, "--output", str(output), "--options", *options]
    assert main(command) == 0
    values = {"run.runner": "zero2", "run.micro_batch_size": 1}
    plan = crosstrain.plan(workspace.config, values, world_size=4, device_memory="1MiB", tokens="1M", presets=False)
    assert plan.as_json() == json.loads(output.read_text())
    assert capsys.readouterr().out == f"{plan}\n"


SCRIPT = """
import crosstrain
from pathlib import Path
print("begins")
run = crosstrain.train("project.yaml", {"run.output_dir": Path("two")}, nproc_per_node=2, fresh=True)
results = crosstrain.evaluate(run.folder, ["val"], nproc_per_node=2)
different, measured = crosstrain.compare("project.yaml", ["ddp", "ddp@2"], steps=2)
with run.open(["run.amp=fp32"], weights=None) as model:
    text, tokens = model.generate("b"), results["splits"]["val"]["tokens"]
    print(len(run.metrics), tokens > 0, different, sorted(measured), bool(text))
"""


@pytest.mark.slow
def test_a_script_without_a_guard_trains_evaluates_and_compares(workspace: Workspace) -> None:
    (workspace.path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=workspace.path, env=PLAIN, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 1
    assert done.stdout.endswith("20 True [] ['ddp', 'ddp (noise)', 'ddp@2'] True\n")
    same = workspace.train("cli", nproc=2)
    rows = [json.loads(line) for line in (workspace.path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == same.column("loss")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_has_the_workers_save(workspace: Workspace, workers: int) -> None:
    (workspace.path / "script.py").write_text(
        "import crosstrain\n"
        "try:\n"
        f"    crosstrain.train('project.yaml', ['run.max_iters=100000'], nproc_per_node={workers})\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=workspace.path,
        env=PLAIN,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: logged_step(workspace.path / "out") > 20, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal and a notebook do
    out, _ = process.communicate(timeout=60)
    assert out.endswith("interrupted\n"), out
    assert process.returncode == 0
    run = crosstrain.Run(workspace.path / "out")
    assert run.latest_checkpoint is not None
    assert f"stopped at step {int(run.latest_checkpoint.name[5:])}" in out


@pytest.mark.slow
def test_what_ends_a_training_is_raised_and_the_process_is_as_before(workspace: Workspace) -> None:
    (workspace.path / "broken").mkdir()
    (workspace.path / "broken" / "model.py").write_text(
        "from crosstrain import registry\nGPT2 = registry.get('model', 'gpt2')\n"
        "@registry.register_model('broken')\nclass Broken(GPT2):\n"
        "    def forward(self, **batch):\n        raise ZeroDivisionError('planted')\n"
        "@registry.register_model('nan')\nclass NaN(GPT2):\n"
        "    def forward(self, **batch):\n        return super().forward(**batch) * float('nan')\n"
    )
    handlers, variables = signal.getsignal(signal.SIGINT), dict(os.environ)
    main_module = sys.modules["__main__"]
    sizes = workspace.config["model"]
    options = {
        "model": sizes | {"arch": "broken"}, "run.plugins": [workspace.path / "broken"],
        "run.output_dir": workspace.path / "bad",
    }  # fmt: skip
    with pytest.raises(Exception, match=r"rank 0 failed:(.|\n)*planted"):
        crosstrain.train(workspace.project, options)
    options |= {"model": sizes | {"arch": "nan"}, "run.output_dir": workspace.path / "nan"}
    with pytest.raises(UserError, match="not finite"):
        crosstrain.train(workspace.project, options)
    assert signal.getsignal(signal.SIGINT) is handlers
    own = {key for key in os.environ if key.startswith("TORCHINDUCTOR_")}  # torch sets it when it is imported
    assert {key: value for key, value in os.environ.items() if key not in own - variables.keys()} == variables
    assert sys.modules["__main__"] is main_module
    assert not torch.distributed.is_initialized()
    deadline = time.monotonic() + 30
    while [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run = crosstrain.train(workspace.project, {"run.output_dir": workspace.path / "ok"})
    assert np.isfinite(run.metrics[-1]["loss"])


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "docs" / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PLAIN.items():
            patch.setenv(name, value)
        patch.delenv("PYTEST_CURRENT_TEST")  # with which a kernel leaves the workers' output to the terminal
        NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {cell.source: json.dumps(cell.get("outputs")) for cell in notebook.cells}
    trained = next(outputs for source, outputs in shown.items() if "crosstrain.train(" in source)
    assert "saving notebook/run/checkpoints/step_000100" in trained  # the workers' log
    evaluated = next(outputs for source, outputs in shown.items() if "crosstrain.evaluate(" in source)
    (perplexity,) = map(float, re.findall(r"'perplexity': ([\d.]+)", evaluated))
    assert 3 < perplexity < 5  # each word has 3 followers; 18 for a model that knows only how often each word occurs
    assert next(outputs for source, outputs in shown.items() if "compare(" in source).count("trains alike") == 1


def test_a_keyword_that_no_check_takes_is_an_error(workspace: Workspace) -> None:
    with pytest.raises(TypeError, match=r"train\(\) has no keyword 'fitcheck'; checks take fit_check, device_memory"):
        crosstrain.train(workspace.project, fitcheck=False)


def test_flags_of_evaluations_are_keywords() -> None:
    with pytest.raises(TypeError, match=r"evaluate\(\) has no keyword 'answer'; evaluations take answers, sheet, "):
        crosstrain.evaluate("nowhere", answer=["val"])
    with pytest.raises(crosstrain.UserError, match="--sheet: needs --answers; give both"):
        crosstrain.evaluate("nowhere", sheet="sheet.png")
