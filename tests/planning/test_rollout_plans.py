"""Plans of runs that sample: the learner's rows, and the key/value cache as a run of the sampler fills it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import crosstrain
from conftest import ROOT
from crosstrain.config.load import load_config
from crosstrain.training.preflight import dry_run
from fixtures_policy import make_guesser
from fixtures_ranks import make_trainer, mostly_slow, run_ranks

PROJECT = ROOT / "projects" / "grpo_arithmetic.yaml"
LAYERS, KV_HEADS, WIDTH = 3, 2, 16
MODEL = {
    "model_type": "qwen2", "vocab_size": 16, "bos_token_id": None, "eos_token_id": 13, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
}  # fmt: skip
OPTIONS: list[Any] = [
    ("model.pretrained", None), ("model.config", MODEL), "run.micro_batch_size=16", "run.device=cpu",
]  # fmt: skip
PROMPT = 11  # a sum has 12 tokens at most, of which one at least is the answer's


def _plan(tmp_path: Path, *options: str, runner: str = "ddp") -> Any:
    data = f"datasets.sums.path={tmp_path}/none"
    made = crosstrain.plan(PROJECT, [*OPTIONS, data, f"run.runner={runner}", *options], world_size=2, presets=False)
    assert not list(tmp_path.iterdir())
    return made


@pytest.mark.parametrize(
    ("runner", "part", "new"),
    [("ddp", 1, 2), ("ddp", 1, 65), ("ddp", 1, 66), ("fsdp", 1, 2), ("megatron_tp2", 2, 2), ("megatron_tp2_sp", 2, 2)],
)
def test_a_plan_names_the_bytes_of_the_cache(tmp_path: Path, runner: str, part: int, new: int) -> None:
    rollouts = _plan(tmp_path, f"run.objective.max_new_tokens={new}", runner=runner).as_json()["rollouts"]
    room = PROMPT + 64 * math.ceil((new - 1) / 64)  # keys of the last token are never needed
    token = 2 * LAYERS * KV_HEADS * WIDTH * 4  # keys and values, fp32
    assert rollouts["key/value cache"] == 16 * 16 * room * token // part
    assert (rollouts["completions"], rollouts["tokens"]) == (64 * 16, 64 * 16 * new)
    assert rollouts["forwards"] == new * 64 // 16 // (1 if part == 2 else 2)
    assert (rollouts["gathered parameters"] > 0) == (runner == "fsdp")


def test_a_plan_is_that_of_the_rows_that_the_model_learns_from(tmp_path: Path) -> None:
    one, many = (_plan(tmp_path, f"run.objective.completions={n}").as_json() for n in (1, 16))
    assert many["tokens_per_step"] == 64 * 16 * 16  # 11 tokens, of which the last is only a label, padded to 16
    assert many["flops_per_step"] == 16 * one["flops_per_step"]
    assert many["memory"]["device"]["activations"] == pytest.approx(
        16 * one["memory"]["device"]["activations"], rel=1e-2
    )
    assert one["memory"]["device"].get("copies of weights") is None
    more = _plan(tmp_path, "run.objective.kl=0.1", "run.objective.updates_per_rollout=3")
    copies = more.as_json()["memory"]["device"]["copies of weights"]
    assert copies == 2 * 4 * many["parameters"]["total"]
    assert "every 3 steps" in str(more)


def test_objectives_that_do_not_sample_have_no_rollouts(tmp_path: Path) -> None:
    made = crosstrain.plan(ROOT / "projects" / "quickstart.yaml", world_size=1, presets=False)
    assert made.as_json()["rollouts"] is None
    assert "rollouts" not in str(made)


@pytest.fixture(scope="module")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_guesser(tmp_path_factory.mktemp("plan"))


def _held(project: str, options: tuple[str, ...]) -> tuple[int, int]:
    """Bytes of the largest cache while a step's completions are sampled, and the prompt's number of tokens."""
    from crosstrain.inference import policy
    from crosstrain.inference.decoder import DecodeState

    found: list[tuple[int, int]] = []

    class Watched(DecodeState):
        def logits(self) -> torch.Tensor:
            before = self.cache.get_seq_length() == 0 and self._ids.shape[1]
            out = super().logits()
            layers = [layer for layer in self.cache.layers if layer.keys is not None]
            size = sum(tensor.untyped_storage().nbytes() for layer in layers for tensor in (layer.keys, layer.values))
            found.append((size, before or found[-1][1]))
            return out

    policy.DecodeState = Watched  # type: ignore[misc]
    next(make_trainer(project, options).batches())
    return max(found)


@pytest.mark.parametrize("layout", mostly_slow(["ddp@1", "fsdp@2", "megatron_tp2@2"], ["ddp@1"]))
def test_the_cache_of_a_run_has_the_planned_size(guesser: Path, tmp_path: Path, layout: str) -> None:
    name, size = layout.split("@")
    options = (f"run.output_dir={tmp_path}/out", f"run.runner={name}", "run.objective.max_new_tokens=6")
    (held, prompt), *_ = run_ranks(int(size), _held, str(guesser / "grpo.yaml"), options)
    config = load_config(guesser / "grpo.yaml", options)
    ready = dry_run(config, int(size))
    made = crosstrain.plan(guesser / "grpo.yaml", options, world_size=int(size), presets=False)
    planned = made.as_json()["rollouts"]["key/value cache"]
    assert ready.sample is not None
    room, longest = prompt + 64, ready.sample["input_ids"].shape[1] + 64
    assert held * longest == planned * room  # the run's prompts have 10 tokens, and the plan's are as long as possible
    assert planned > 0
