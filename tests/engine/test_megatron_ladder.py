"""The project files from 345M to 175B, scaled down: each trains, saves, resumes and generates in its layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Run
from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model, make_runner
from crosstrain.engine.checks import batch_plan
from fixtures_ranks import run_ranks, train

TINY = (
    "model.n_embd=64", "model.n_head=4", "model.n_layer=4", "model.n_positions=32", "model.vocab_size=320",
    "run.warmup_fraction=null", "run.warmup_steps=1", "run.lr_decay_iters=4", "run.log_interval=1", "run.device=cpu",
    "run.eval_interval=null",
)  # fmt: skip
FP16 = "run.amp.initial_scale=1024"  # 2^32 would take more than these few steps to come down

# Ranks of the real layout, and how it is had on at most four: options, ranks, samples of a micro batch and of a step.
LADDER: dict[str, tuple[int, tuple[str, ...], int, int, int]] = {
    "gpt2_345m_dp2": (2, (), 2, 1, 2),
    "gpt2_345m_tp2": (2, (), 2, 2, 2),
    "gpt2_345m_8gpu": (8, (), 4, 1, 8),
    "gpt3_125m": (1, (), 1, 2, 4),
    "gpt3_1_3b": (4, (), 4, 1, 8),
    "gpt3_13b": (16, ("run.runner.pipeline_parallel=2",), 4, 1, 8),  # two copies, so that ZeRO-1 has something to do
    "gpt3_175b": (128, ("run.runner.tensor_parallel=2", "run.runner.pipeline_parallel=2"), 4, 1, 2),
}


def overrides(name: str, dataset: Path) -> tuple[str, ...]:
    _, layout, _, micro, batch = LADDER[name]
    [label] = load_config(ROOT / "projects" / f"{name}.yaml").datasets
    data = f"datasets.{label}={{path: {dataset}, seq_length: 32, split: [80, 10, 10]}}"
    sizes = (f"run.micro_batch_size={micro}", f"run.global_batch_size={batch}")
    fp16 = () if name == "gpt3_175b" else (FP16,)
    return (*TINY, data, *sizes, *layout, *fp16)


@pytest.mark.parametrize("name", LADDER)
def test_the_numbers_of_a_project_go_together_on_its_ranks(name: str) -> None:
    config = load_config(ROOT / "projects" / f"{name}.yaml")
    ranks = LADDER[name][0]
    plan = batch_plan(config, ranks)
    assert plan.global_batch == plan.micro_batch * plan.accumulation * plan.dp_size
    run, model = config.run, config.model.options
    assert run.max_iters is not None
    tokens = run.max_iters * plan.global_batch * model.n_positions
    expected = {"gpt3_125m": 2.5e9, "gpt3_1_3b": 26e9, "gpt3_13b": 260e9, "gpt3_175b": 3.5e12}
    if name in expected:
        assert tokens == pytest.approx(expected[name], rel=1e-3)
    if name == "gpt2_345m_8gpu":
        assert (plan.global_batch, plan.micro_batch, plan.accumulation) == (64, 4, 2)
        assert (run.lr_decay_iters, run.warmup_fraction) == (320_000, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", LADDER)
def test_a_project_trains_saves_resumes_and_generates(name: str, tmp_path: Path, dataset: Path) -> None:
    size = LADDER[name][2]
    path = ROOT / "projects" / f"{name}.yaml"
    folder = tmp_path / "run"
    common = (f"run.output_dir={folder}", *overrides(name, dataset))
    _train_here(path, tmp_path, *common, "run.max_iters=2", size=size)
    run = _train_here(path, tmp_path, *common, "run.max_iters=4", size=size)
    assert run.column("step") == [1, 2, 3, 4]
    assert run.rows[-1]["loss"] < run.rows[0]["loss"]
    said = run_ranks(size, _say, str(folder / "checkpoints" / "step_000004"))
    assert all(text == said[0] for text in said)
    assert said[0]


def _train_here(path: Path, folder: Path, *options: str, size: int) -> Run:
    """Train a project file that lies elsewhere."""
    link = folder / path.name
    if not link.exists():
        link.write_text(path.read_text())
    return train(link, "run", *options, size=size)


def _say(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    from crosstrain.inference.generation import Sampling, as_prompt, generate
    from crosstrain.inference.open_checkpoint import saved_config

    config = saved_config(Path(checkpoint), [])
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, Path(checkpoint), for_training=False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    asked = as_prompt(tokenizer("ban", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    said = generate(runner, tokenizer, asked, Sampling(max_new_tokens=8))
    runner.close()
    return said
