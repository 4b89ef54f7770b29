"""Values of model options: what makes no sense is one sentence; a pretrained folder's sizes count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from crosstrain.config.load import Config, load_config
from crosstrain.engine.build import make_model
from crosstrain.modeling.base import Model
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.utils.errors import ConfigError
from fixtures_families import FAMILIES, tiny
from fixtures_ranks import mostly_slow

GPT2, BLIP2 = "projects/quickstart.yaml", "projects/blip2_qwen_shapes.yaml"
LLAMA: dict[str, Any] = tiny("llama")


def made(project: str, *options: str) -> Model:
    config = load_config(project, options)
    with parameters_on_meta():
        return make_model(config)


def causal_lm(**more: Any) -> str:
    return f"model={{arch: causal_lm, config: {LLAMA | more}}}"


SIZES = ["0", "-1", "-64", "100000000000000000000", "1.5", "x"]
NUMBERS = ["0", "-1", ".inf", ".nan", "x"]
RATES = ["1", "1.5", "-0.1", ".inf", "x"]
VALUES = {
    GPT2: {
        **dict.fromkeys(
            ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "make_vocab_size_divisible_by"), SIZES
        ),
        "dropout": RATES,
        "pretrained": ["''"],
    },
    "qwen": {
        **dict.fromkeys(
            ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings", "make_vocab_size_divisible_by"), SIZES
        ),
        "attention_dropout": RATES,
        **dict.fromkeys(("rope_theta", "initializer_range"), NUMBERS),
    },
    BLIP2: {
        **dict.fromkeys(("vision.image_size", "vision.patch_size", "vision.embed_dim", "vision.depth"), SIZES),
        **dict.fromkeys(("vision.num_heads", "qformer.hidden_size", "qformer.num_query_tokens"), SIZES),
        **dict.fromkeys(("qformer.num_hidden_layers", "qformer.num_attention_heads"), SIZES),
        **dict.fromkeys(("qformer.intermediate_size", "qformer.cross_attention_frequency"), SIZES),
        **dict.fromkeys(("vision.mlp_ratio", "vision.position_std", "qformer.layer_norm_eps"), NUMBERS),
        **dict.fromkeys(("qformer.query_std", "projector.initializer_range", "vision.lr_scale"), NUMBERS),
        **dict.fromkeys(("vision.drop_path_rate", "qformer.dropout"), RATES),
        "language_model.lora": ["{rank: 0}", "{alpha: 0}", "{dropout: 1.0}", "{targets: []}"],
    },
}  # fmt: skip


@pytest.mark.parametrize("project", mostly_slow(VALUES, [GPT2, "qwen"]))
def test_a_value_out_of_bounds_is_a_sentence_that_names_it(project: str) -> None:
    arch = ["model={arch: qwen, model_type: tiny}"] if project == "qwen" else []
    for key, values in VALUES[project].items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"model\.{key}"):
                load_config(GPT2 if arch else project, [*arch, f"model.{key}={value}"])


CROSSED = {
    "model.n_head=3": "3 heads do not divide n_embd",
    "model={arch: qwen, model_type: tiny, num_key_value_heads: 3}": "3 does not divide num_attention_heads=4",
    "model={arch: qwen, model_type: tiny, num_attention_heads: 6}": "num_attention_heads",
    "model={arch: qwen, model_type: qwen3_0.6b, head_dim: 15}": "expected an even number for rotary positions, got 15",
    "model={arch: qwen, model_type: tiny, hidden_size: 60}": "need an even head width, but 4 heads have width 15",
    "model={arch: qwen, model_type: tiny, head_dim: 16}": "qwen2 does not have this option",
    causal_lm(num_hidden_layer=2): "model.config.num_hidden_layer: unknown key; did you mean num_hidden_layers?",
    causal_lm(nonsense_key=5): "model.config.nonsense_key: unknown key; LlamaConfig has",
    causal_lm(temperature=0.5): "model.config.temperature: unknown key",
    causal_lm(rope_scaling={"rope_type": "linear", "facto": 2.0}): "rope_scaling.facto: unknown key; did you mean",
    causal_lm(model_type="lama"): "no causal language model 'lama'; did you mean llama?",
    causal_lm(model_type="gemma3"): "unknown key",
    "model={arch: causal_lm, config: {model_type: gemma3}}": "use its language model's type, gemma3_text",
    causal_lm(vocab_size="x"): "expected int, got str",
    causal_lm(hidden_size=63): "is not a multiple of the number of attention heads",
    causal_lm(num_attention_heads=0): "transformers cannot build a model from it",
    causal_lm(num_key_value_heads=3): "3 does not divide num_attention_heads=4",
    "model={arch: causal_lm, config: {model_type: mixtral, num_local_experts: 2, num_experts_per_tok: 4}}": (
        "model.config.num_experts_per_tok: 4 is more than the 2 experts"
    ),
    causal_lm(num_hidden_layers=0): "model.config.num_hidden_layers: expected 1 to 10000, got 0",
    causal_lm(num_hidden_layers=10**12): "expected 1 to 10000",
    causal_lm(intermediate_size=0): "model.config.intermediate_size: expected 1 to",
    causal_lm(max_position_embeddings=0): "model.config.max_position_embeddings: expected 1 to",
    causal_lm(attention_dropout=1.5): (
        "model.config.attention_dropout: expected a number of at least 0 and below 1, got 1.5"
    ),
    causal_lm(hidden_act="nope"): "transformers cannot build a model from it",
}


@pytest.mark.parametrize("option", CROSSED)
def test_values_that_do_not_go_together_are_a_sentence(option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(GPT2, option)
    assert CROSSED[option] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", [{"rope_theta": 1e5}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}])
def test_older_names_are_known(more: dict[str, Any]) -> None:
    config = made(GPT2, causal_lm(**more)).lm.config
    assert config.rope_parameters["rope_theta"] == more.get("rope_theta", 1e4)
    assert config.rope_parameters.get("factor") == more.get("rope_scaling", {}).get("factor")


def test_the_keys_of_every_family_are_known() -> None:
    from crosstrain.config.registry import registry

    options = registry.get("model", "causal_lm").Options
    for family in FAMILIES:
        assert options(config=tiny(family)).config["model_type"] == family


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a GPT-2 and a Qwen2, two blocks each."""
    path = tmp_path_factory.mktemp("published")
    sizes = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, **sizes)).save_pretrained(path / "gpt2")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    qwen = Qwen2Config(num_hidden_layers=2, hidden_size=32, max_position_embeddings=64, **heads, **sizes)
    Qwen2ForCausalLM(qwen).save_pretrained(path / "qwen")
    return path


def chosen(project: str, *options: str) -> tuple[Config, PreTrainedConfig]:
    """The configuration, and transformers' of the language model; which reads itself back as a worker does."""
    config, model = load_config(project, options), made(project, *options)
    assert Config.from_plain(config.plain).model == config.model
    return config, getattr(model, "language_model", model).config


def test_a_pretrained_folders_sizes_win_over_a_presets(folders: Path) -> None:
    qwen = folders / "qwen"
    for project, option in {
        GPT2: f"model.pretrained={folders / 'gpt2'}",
        BLIP2: f"model.language_model.model.pretrained={qwen}",
        "projects/gpt2_345m.yaml": f"model={{arch: qwen, model_type: tiny, pretrained: {qwen}}}",
    }.items():
        config, theirs = chosen(project, option)
        assert (theirs.num_hidden_layers, theirs.hidden_size, theirs.max_position_embeddings) == (2, 32, 64)
        assert config.sized != config.model


@pytest.mark.parametrize(
    ("project", "option", "sentence"),
    [
        (GPT2, "model={arch: gpt2, pretrained: FOLDERS/gpt2, n_layer: 4}", "n_layer is 4, but the weights in .* 2"),
        (GPT2, "model={arch: gpt2, pretrained: FOLDERS/gpt2, n_head: 4}", "n_head is 4, but the weights in .* have 2"),
        (GPT2, "model={arch: qwen, pretrained: FOLDERS/qwen, num_hidden_layers: 3}", "num_hidden_layers is 3, but the"),
        (GPT2, "model={arch: qwen, pretrained: FOLDERS/qwen, tie_word_embeddings: true}", "is True, .* have False"),
        (BLIP2, "model.language_model.model={name: qwen, pretrained: FOLDERS/qwen, hidden_size: 64}", "size is 64"),
        (GPT2, "model={arch: causal_lm, pretrained: FOLDERS/qwen, config: {hidden_size: 64}}", "size is 64, but"),
        (GPT2, "model={arch: causal_lm, pretrained: FOLDERS/qwen, config: {model_type: llama}}", "type is llama"),
        (GPT2, "model={arch: causal_lm, pretrained: FOLDERS/qwen, config: {atention_dropout: 0.1}}", "did you mean"),
    ],
)  # fmt: skip
def test_sizes_that_differ_from_a_pretrained_folders_are_a_sentence(
    folders: Path, project: str, option: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        made(project, option.replace("FOLDERS", str(folders)))


def test_what_weights_do_not_fix_may_be_given_beside_them(folders: Path) -> None:
    given = f"pretrained: {folders / 'qwen'}"
    longer = f"model={{arch: qwen, {given}, max_position_embeddings: 128}}"
    assert chosen(GPT2, longer)[1].max_position_embeddings == 128
    options = f"model={{arch: causal_lm, {given}, config: {{attention_dropout: 0.25}}}}"
    assert chosen(GPT2, options)[1].attention_dropout == 0.25


def test_presets_give_a_plan_the_sizes_of_weights_that_are_away() -> None:
    config = load_config("projects/blip2_qwen7b_align.yaml")
    assert config.model.options.language_model.model.options.num_hidden_layers is None
    assert config.sized.options.language_model.model.options.num_hidden_layers == 28
