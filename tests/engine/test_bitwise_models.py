"""`run.bitwise` beyond GPT-2: other families, adapters, experts, images, Muon, tensor parallelism, and their losses."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from test_bitwise import COMMON, digest

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.data.splits import prepare_data
from crosstrain.training.preflight import preflight
from crosstrain.utils.errors import ConfigError
from fixtures_families import tiny
from fixtures_ranks import mostly_slow, train
from fixtures_training import project
from fixtures_vision import OPEN, options, shapes, write_project

SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen": {"arch": "qwen", **SMALL},
    "tied_qwen3": {"arch": "causal_lm", "config": tiny("qwen3") | {"vocab_size": 320, "tie_word_embeddings": True}},
    "llama_lora": {
        "arch": "causal_lm",
        "config": {"model_type": "llama", **SMALL},
        "adapter": {"name": "lora", "rank": 4, "dropout": 0.1},
    },
    "experts": {"arch": "causal_lm", "config": tiny("qwen3_moe") | {"vocab_size": 320}},
    "muon": {"arch": "qwen", **SMALL},
    "wide": {"arch": "qwen", **SMALL, "num_key_value_heads": 4},
    "wide_gpt2": {"arch": "gpt2", "vocab_size": 320, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32,
                  "dropout": 0.1},
    "wide_experts": {
        "arch": "causal_lm",
        "config": {"model_type": "mixtral", **SMALL, "num_key_value_heads": 4, "num_local_experts": 4,
                   "attention_dropout": 0.1},
    },
    "wide_lora": {
        "arch": "causal_lm",
        "config": {"model_type": "llama", **SMALL, "num_key_value_heads": 4, "attention_dropout": 0.1},
        "adapter": {"name": "lora", "rank": 4, "dropout": 0.1},
    },
}  # fmt: skip
# In half precision: biases that DeepSpeed would not round, and adapters whose input peft converts.
HALF = {"qwen2 in bf16": ("run.amp=bf16",), "lora in bf16": ("run.amp=bf16",)}
MODELS["qwen2 in bf16"] = {"arch": "causal_lm", "config": {"model_type": "qwen2", **SMALL}}
MODELS["lora in bf16"] = {
    "arch": "causal_lm", "config": {"model_type": "llama", **SMALL},
    "adapter": {"name": "lora", "rank": 4, "dropout": 0.1},
}  # fmt: skip
WIDE = ["wide", "wide_gpt2", "wide_lora", "wide_experts"]
SLICED = {f"sliced {name.removeprefix('wide_')}": name for name in ("wide", "wide_gpt2", "wide_lora", "tied_qwen3")}
SLICED["sliced in bf16"] = "wide_gpt2"
MODELS |= {name: MODELS[model] for name, model in SLICED.items()}
OPTIONS = {
    "muon": ("run.optimizer=muon",),
    **HALF,
    **dict.fromkeys(WIDE, ("run.bitwise.width=4",)),
    **dict.fromkeys(SLICED, ("run.bitwise.slices=4",)),
    "sliced in bf16": ("run.bitwise.slices=4", "run.amp=bf16"),
}
RUNNERS = ["ddp@3", "fsdp@2", "zero1@2", "zero2@4", "zero3@3"]
TENSOR = [
    "megatron_tp2@2",
    "megatron_tp2@4",
    "{name: megatron, tensor_parallel: 4}@4",
    "{name: megatron, tensor_parallel: 2, pipeline_parallel: 2}@4",
]
CASES = [(model, runner) for model in MODELS for runner in RUNNERS]
TIED = {"sliced gpt2", "sliced tied_qwen3", "sliced in bf16"}  # slices refuse pipelines of these models
CASES += [(model, "megatron_pp2@2") for model in MODELS if model not in TIED]
CASES += [(model, runner) for model in WIDE for runner in TENSOR]
CASES += [(model, "megatron_tp2_sp@2") for model in WIDE if model != "wide_lora"]
CASES += [("experts", f"{{name: megatron, expert_parallel: 2}}@{ranks}") for ranks in (2, 4)]
CASES += [("wide_experts", "{name: megatron, tensor_parallel: 2, expert_parallel: 2}@4")]
CASES += [
    (model, f"{{name: {runner}, context_parallel: {degree}}}@{ranks}")
    for model in SLICED
    for runner, degree, ranks in (("fsdp", 2, 4), ("ddp", 2, 2), ("zero2", 2, 4), ("zero3", 2, 2), ("megatron", 2, 4))
]
CASES += [("sliced gpt2", f"{{name: {runner}, context_parallel: 4}}@4") for runner in ("ddp", "fsdp")]
CASES += [("images", runner) for runner in RUNNERS]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    """Return a function from a case's model to its project, its options, and the digests of one process."""

    @lru_cache
    def make(model: str) -> tuple[Path, tuple[str, ...], dict[str, str]]:
        folder = tmp_path_factory.mktemp(model)
        given = (*COMMON, "run.init_lr=1e-2", *OPTIONS.get(model, ()))
        if model == "images":
            path = write_project(folder / "project.yaml", shapes(folder))
            prepare_data(load_config(path))
            given += tuple(options(OPEN))
        else:
            path = project(Workspace(folder, dataset), MODELS[model]).project
        return path, given, digest(train(path, "one", *given))

    return make


@pytest.mark.parametrize("case", mostly_slow(CASES, []), ids="-".join)
def test_other_models_train_to_the_same_bits(reference: Any, case: tuple[str, str]) -> None:
    model, name = case
    path, given, one = reference(model)
    runner, _, size = name.partition("@")
    folder = "".join(c for c in name if c.isalnum())
    found = digest(train(path, folder, *given, f"run.runner={runner}", size=int(size)))
    assert found["weights"] == one["weights"]
    assert found["moments"] == one["moments"]
    if not ("experts" in model and ("pp2" in runner or "pipeline" in runner)):  # stages add their own routers' losses
        assert found["metrics"] == one["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_slices_have_the_same_bits_with_every_gradient_checkpointing(reference: Any, mode: str) -> None:
    path, given, one = reference("sliced gpt2")
    found = digest(train(path, mode, *given, f"run.gradient_checkpointing={mode}"))
    assert (found["weights"], found["moments"]) == (one["weights"], one["moments"])


@pytest.mark.slow
def test_adapters_are_refused_where_they_would_see_a_part_of_the_sequence(reference: Any) -> None:
    path, given, _ = reference("wide_lora")
    config = load_config(path, [*given, "run.runner=megatron_tp2_sp"])
    with pytest.raises(ConfigError, match=r"lora_A\.weight would be applied to a part of the sequence"):
        preflight(config, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("sliced gpt2", ["run.runner=megatron_pp2"], "tied embedding"),
        ("experts", ["run.bitwise.slices=2"], "without experts"),
        ("sliced lora", ["model.adapter.dora=true"], "and DoRA"),
    ],
)
def test_what_slices_cannot_compute_is_refused(reference: Any, model: str, options: list[str], message: str) -> None:
    path, given, _ = reference(model)
    with pytest.raises(ConfigError, match=message):
        preflight(load_config(path, [*given, *options]), 2)
