"""A user's mistake is one sentence and exit code 1; what works prints what a stranger needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import ENVIRONMENT, ROOT, Workspace, write_text
from crosstrain.cli.main import main
from fixtures_processes import program, train_as_user
from fixtures_ranks import run_ranks, train
from fixtures_tampering import seal


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistaken command prints."""
    assert main(list(arguments)) == 1
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in captured.err + captured.out
    return lines[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["run.max_iter=5"], "max_iters"),
        (["run.runner=dpp"], "ddp"),
        (["run.runner={name: ddp, bucket_cap: 3}"], "bucket_cap_mb"),
        (["run.optimizer=adamW2"], "adamw"),
        (["run.lr_sched=cosin"], "cosine"),
        (["run.amp=fp8"], "fp8"),
        (["run.gradient_checkpointing=ful"], "full"),
        (["run.global_batch_size=9"], "nearest valid global_batch_size"),
        (["run.init_lr=fast"], "init_lr"),
        (["run.max_iters=2.5"], "max_iters"),
        (["run.warmup_steps=50"], "warmup"),
        (["run.plugins=[nowhere]"], "nowhere"),
        (["model.arch=gpt3"], "gpt2"),
        (["model.n_layers=3"], "n_layer"),
        (["model.model_type=346m"], "345m"),
        (["datasets.tiny.path=nowhere"], "nowhere"),
        (["datasets.tiny.split=[100, 0, 0]", "run.eval_interval=5"], "val split"),
        (["datasets.tiny.seq_length=1000000"], "seq_length"),
        (["datasets.tiny.name=txt"], "text"),
        (["datasets.other={name: text, path: nowhere, seq_length: 8}"], "nowhere"),
        (["model.vocab_size=100"], "set vocab_size=3"),
        (["model.n_head=3"], "n_embd=32"),
        (["model.n_positions=16"], "at most 16"),
        (["run.output_dir=/dev/null/x"], "output_dir"),
        (["run.resume_from=nowhere"], "nowhere"),
        (["run.seed"], "key=value"),
    ],
)
def test_mistakes_in_options(
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(workspace.path)
    line = complaint(capsys, "train", "--cfg-path", "project.yaml", "--nproc-per-node", "1", "--options", *options)
    assert expected in line


PLUGIN = """from crosstrain import Objective, registry

@registry.register_objective("looks_up")
class LooksUp(Objective):
    def loss(self, losses, batch):
        return losses.sum() * batch["teacher"]

    def units(self, batch):
        return 1
"""


@pytest.mark.slow
def test_an_error_in_a_plugin_names_its_line(workspace: Workspace) -> None:
    plugin = workspace.path / "looks_up.py"
    plugin.write_text(PLUGIN)
    done = train_as_user(workspace, "out", f"run.plugins=[{plugin}]", "run.objective=looks_up", fails=True)
    assert done.code == 1
    assert f"error: {plugin}:6, in loss: KeyError: 'teacher' (set CROSSTRAIN_DEBUG=1 for a traceback)" in done.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "--cfg-path"),
        (["train", "x.yaml", "--dry-run"], "are required: --cfg-path; see "),
        (["serve", "output/x"], "are required: --checkpoint; see "),
        (["export", "output/x", "--output", "y"], "are required: --checkpoint; see "),
        (["generate", "--checkpoint", "x"], "unknown value 'generate'; did you mean evaluate --generate TEXT?"),
        (["chat", "--url", "http://127.0.0.1:1"], "unknown value 'chat'; did you mean evaluate --interactive --chat?"),
        (["compare", "--runners", "ddp", "zero2", "--options", "run.seed=1", "x.yml"], "required: --cfg-path; see "),
        (["evaluate", "--checkpoint", "out", "x.yaml"], "unrecognized arguments: x.yaml; see "),
        (["prepare", "x.yaml"], "unknown value 'x.yaml'; choose from inspect; see "),
        (["train", "--cfg-path", "projects/quikstart.yaml"], "quickstart.yaml"),
        (["trian", "--cfg-path", "x.yaml"], "did you mean train?; see "),
        (["train", "--config", "x.yaml"], "unknown flag --config; pass the project file with --cfg-path; see "),
        (["train", "--learning_rate", "1"], "use this name for run.init_lr; set it in the project file, or "),
        (["train", "--max-iters", "1"], "unknown flag --max-iters; the option is run.max_iters; set it in "),
        (["train", "--cfg-paht", "x.yaml"], "unknown flag --cfg-paht; did you mean --cfg-path?; see "),
        (["train", "--cfg-path", "x.yaml", "--optons", "a=1"], "did you mean --options?; see "),
        (["new", "modle", "x"], "did you mean model?"),
        (["plan", "--cfg-path", "nowhere.yaml"], "nowhere.yaml: no such file or folder; looked in"),
        (["serve", "--checkpoint", "nowhere"], "nowhere: no such file or folder; looked in"),
        (["train", "--cfg-path", "x.yaml", "--nproc-per-node", "two"], "two"),
        (["evaluate", "--checkpoint", "nowhere"], "nowhere"),
        (["evaluate", "--checkpoint", "."], "not a checkpoint"),
        (["list", "runers"], "did you mean runner?"),
        (["prepare", "--input", "nowhere", "--output", "x", "--train-tokenizer", "300"], "nowhere"),
        (["prepare", "--input", "stdlib", "--output", "x"], "tokenizer"),
    ],
)
def test_mistakes_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in complaint(capsys, *arguments)


def test_keys_that_another_name_leaves_behind_are_told(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.path)
    options = ["datasets.tiny.name=chat", "run.callbacks=[]", "run.runner=fsdp", "model.n_layer=1"]
    assert main(["train", "--cfg-path", "project.yaml", "--nproc-per-node", "1", "--options", *options]) == 1
    note, *errors = capsys.readouterr().err.splitlines()
    left = [part.rpartition(" ")[2] for part in note.split(";")]
    assert note.startswith("note: --options select different components, so these settings are ignored: project.yaml:")
    assert left == [f"datasets.tiny.{key}" for key in ("path", "seq_length", "split")]
    assert all(error.startswith("error: project.yaml:") for error in errors)


def test_a_misspelt_folder_of_weights_is_named(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.path)
    (workspace.path / "weights").mkdir()
    words = ["train", "--cfg-path", "project.yaml", "--nproc-per-node", "1", "--options"]
    for source in ("wieghts", str(workspace.path / "wieghts")):
        assert "did you mean weights?" in complaint(capsys, *words, f"model.pretrained={source}")
        assert main([words[0], "--dry-run", *words[1:], f"model.pretrained={source}"]) == 0
        assert "the hub's model; did you mean weights?" in capsys.readouterr().out


def test_a_dry_run_uses_a_model_of_the_hub_that_is_on_the_machine(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    workspace.project.write_text(yaml.safe_dump(workspace.config | {"model": {"arch": "causal_lm"}}))
    words = ["train", "--cfg-path", str(workspace.project), "--nproc-per-node", "1", "--dry-run", "--options"]
    words.append("model.pretrained=acme/tiny")
    said = "acme/tiny: not on this machine, so the model's sizes are unknown; download it with `hf download acme/tiny`"
    assert said in complaint(capsys, *words)
    (tmp_path / "weights").mkdir()
    assert "weights?" in complaint(capsys, *words[:-1], f"model.pretrained={tmp_path / 'wieghts'}")
    place, revision = tmp_path / "models--acme--tiny", "0" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(revision)
    sizes = GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=32, vocab_size=320)
    GPT2LMHeadModel(sizes).save_pretrained(place / "snapshots" / revision)
    assert main(words) == 0
    assert "(24,032 without padding)" in capsys.readouterr().out


def test_a_path_that_does_not_exist_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom crosstrain.cli.main import main\n"
        "verbs = ['train', 'plan', 'evaluate', 'serve', 'export', 'samples', 'compare', 'verify']\n"
        "more = {'export': ['--output', 'x'], 'compare': ['--runners', 'ddp']}\n"
        "for verb in verbs:\n"
        "    flag = '--checkpoint' if verb in ('evaluate', 'serve', 'export') else '--cfg-path'\n"
        "    assert main([verb, flag, 'nowhere', *more.get(verb, [])]) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.count("error: nowhere: no such file or folder; looked in ") == 8, done.stderr


def test_a_checkpoint_cannot_make_evaluation_import_code(workspace: Workspace) -> None:
    train(workspace.project, "out", "run.max_iters=1")
    plugins = workspace.path / "trap"
    plugins.mkdir()
    (plugins / "trap.py").write_text(
        "from pathlib import Path\nfrom crosstrain import registry\nPath('sprung').touch()\n"
        "@registry.register_model('trap')\nclass Trap:\n    pass\n"
    )
    state_file = workspace.path / "out" / "checkpoints" / "step_000001" / "state.json"
    state = json.loads(state_file.read_text())
    state["config"]["run"]["plugins"] = [str(plugins)]
    state["config"]["model"] = {"arch": "trap"}
    state_file.write_text(json.dumps(state))
    seal(state_file.parent)

    evaluated = program(workspace.path, "evaluate", "--checkpoint", "out")
    assert evaluated.code == 1
    assert "are not imported; if you trust them, pass the project file with --cfg-path" in evaluated.err
    assert "Traceback" not in evaluated.err
    assert not (workspace.path / "sprung").exists()


@pytest.mark.slow
def test_two_trainings_in_one_folder_are_refused(workspace: Workspace) -> None:
    from filelock import FileLock

    (workspace.path / "out").mkdir()
    with FileLock(workspace.path / "out" / ".lock"):
        run = workspace.train("out", "run.max_iters=1", fails=True)
    assert run.code == 1
    assert "another process is training" in run.err


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_leave_their_core_to_others(given: dict[str, str], spins: str | None) -> None:
    plain = {key: value for key, value in ENVIRONMENT.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import crosstrain, os, sys; assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = plain | {"PYTHONPATH": str(ROOT / "platform")} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{spins}\n"


def test_list_shows_every_kind_with_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in ("runner:", "ddp", "gpt2", "adamw", "cosine_megatron_v1", "plugins/models/gpt2.py"):
        assert name in out


def test_list_shows_the_options_of_a_component(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "runner", "megatron_tp2"]) == 0  # a preset
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    ranks = "number of ranks over which the matrices of each block are sharded"
    assert f"tensor_parallel {ranks} [a whole number of at least 1; default: 1]" in lines
    assert any(line.startswith("megatron_tp2 Tensor parallelism over 2 ranks") for line in lines)
    assert not any(line.startswith(("ddp", "zero2")) for line in lines)
    main(["list", "dataset", "mixture"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "parts datasets and their shares [a list of a mapping that is not empty; required]" in lines


def test_prepare_says_what_it_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = write_text(tmp_path / "a.jsonl", documents=5)
    assert main(["prepare", "--input", str(text), "--train-tokenizer", "300", "--output", str(tmp_path / "out")]) == 0
    assert "5 documents" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["documents"] == 5


@pytest.mark.slow
def test_a_run_from_nothing_to_text(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prepares its data, trains, validates, evaluates and generates, as the quickstart does."""
    text = write_text(workspace.path / "text.jsonl")
    workspace.config["datasets"]["tiny"] |= {
        "path": "data/new",
        "prepare": {"input": str(text), "train_tokenizer": 300},
    }
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    run = workspace.train(
        "out",
        "run.max_iters=60",
        "run.eval_interval=30",
        "run.save_interval=30",
        "run.log_interval=10",
        "run.sample_prompts=['ban ']",
    )
    for expected in ("  lr ", " tok/s  ", "validation perplexity", "open next:"):
        assert expected in run.out
    assert "| ban " in run.out
    assert run.column("step") == [10, 20, 30, 40, 50, 60]
    assert {"loss", "lr", "grad_norm", "loss_scale", "tokens_per_second", "timers"} <= run.rows[0].keys()
    assert run.rows[-1]["val_loss"] < run.rows[2]["val_loss"]

    arguments = ["--checkpoint", "out", "--splits", "train", "val", "test", "--output", "results.json"]
    evaluated = workspace.evaluate(*arguments, "--generate", "ban", "--max-new-tokens", "8", "--num-completions", "2")
    assert evaluated.code == 0, evaluated.err
    results = json.loads((workspace.path / "results.json").read_text())
    assert set(results["splits"]) == {"train", "val", "test"}
    assert results["splits"]["val"]["perplexity"] < 100
    assert len(results["completions"][0]["completions"]) == 2

    monkeypatch.chdir(workspace.path)  # in this process
    split = ["--options", "datasets.tiny.split=[80,20,0]"]
    assert main(["evaluate", "--checkpoint", "out", *split]) == 0
    assert "split test is skipped: datasets.tiny: the test split" in caplog.text
    assert main(["evaluate", "--checkpoint", "out", "--splits", "val", "test", *split]) == 1
    assert capsys.readouterr().err.endswith("; choose other splits\n")
    assert "larger" not in caplog.text

    two = [*arguments[:-1], str(workspace.path / "two.json"), "--options", "run.micro_batch_size=3"]
    assert run_ranks(2, main, ["evaluate", "--checkpoint", str(run.folder), *two[2:]]) == [0, 0]
    other = json.loads((workspace.path / "two.json").read_text())
    for split, numbers in results["splits"].items():
        # Sums of fp32 losses over other groups of samples.
        assert other["splits"][split]["loss"] == pytest.approx(numbers["loss"], rel=1e-6)
        assert other["splits"][split]["tokens"] == numbers["tokens"]


@pytest.mark.slow
def test_conversation_ends_at_stop(workspace: Workspace) -> None:
    import subprocess
    import sys

    from conftest import ENVIRONMENT, ROOT

    train(workspace.project, "out", "run.max_iters=2")
    done = subprocess.run(
        [sys.executable, str(ROOT / "evaluate.py"), "--checkpoint", "out", "--interactive", "--max-new-tokens", "4"],
        input="ban\n" + "ban " * 200 + "\nstop\nnot read\n",
        cwd=workspace.path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "`stop` to end" in done.stdout
    assert "shorten the prompt" in done.stdout
    assert "not read" not in done.stdout


def test_a_misspelled_name_is_told_before_torch_is_imported(workspace: Workspace) -> None:
    script = (
        "import sys\nfrom crosstrain.cli.main import main\n"
        "for verb in ('train', 'train --dry-run', 'plan', 'samples', 'verify', 'launch --to slurm'):\n"
        "    options = ['run.max_iter=3'] if verb == 'plan' else ['run.runner=ddpp', 'model.arch=gpt']\n"
        "    assert main([*verb.split(), '--cfg-path', 'project.yaml', '--options', *options]) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=workspace.path, env=environment, capture_output=True, text=True, check=True
    )
    key = "error: --options: run.max_iter: unknown key; did you mean run.max_iters?"
    runner = "error: --options: run.runner: there is no runner called 'ddpp'; did you mean ddp?; known: "
    lines = done.stderr.splitlines()
    assert lines.count(key) == 1
    assert sum(line.startswith(runner) for line in lines) == 5
    assert sum("there is no model called 'gpt'" in line for line in lines) == 5
