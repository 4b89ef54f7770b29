"""The model is transformers' own: sizes, initial values, weights in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from conftest import Workspace, json_lines
from crosstrain.checkpoint.load_weights import fill_initial
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.engine.build import build_model, make_model
from crosstrain.engine.runner import Runner
from crosstrain.modeling.meta_init import materialize, parameters_on_meta
from crosstrain.utils.errors import CheckpointError, UserError
from fixtures_gpt2 import build
from fixtures_ranks import train


def test_345m_has_the_published_number_of_parameters() -> None:
    config = load_config("projects/gpt2_345m.yaml")
    with parameters_on_meta():
        model = make_model(config)
    parameters = model.weights.parameters()
    assert sum(p.numel() for p in parameters.values()) == 354_871_296
    assert sum(model.weights.logical_shape(name, p.shape).numel() for name, p in parameters.items()) == 354_823_168


@pytest.mark.parametrize(("size", "count"), [("125m", 124_439_808), ("774m", 774_030_080), ("1.5b", 1_557_611_200)])
def test_the_other_sizes(size: str, count: int) -> None:
    config = load_config("projects/gpt2_345m.yaml", [f"model.model_type={size}"])
    with parameters_on_meta():
        model = make_model(config)
    shapes = [model.weights.logical_shape(name, p.shape) for name, p in model.weights.parameters().items()]
    assert sum(shape.numel() for shape in shapes) == count


def test_initial_values_have_the_distributions_of_transformers() -> None:
    sizes: dict[str, Any] = {"n_embd": 256, "vocab_size": 4000, "n_layer": 3, "initializer_range": 0.01}
    ours = build(*(f"model.{key}={value}" for key, value in sizes.items())).model
    theirs = GPT2LMHeadModel(GPT2Config(n_head=2, n_positions=256, **sizes))
    theirs.init_weights()
    reference = dict(theirs.named_parameters())
    for name, parameter in ours.weights.parameters().items():
        value = parameter[: reference[name].shape[0]]
        # Five standard errors of a standard deviation estimated from n normal values.
        allowed = 5 * reference[name].std().item() / (2 * value.numel()) ** 0.5 + 1e-12
        assert value.std().item() == pytest.approx(reference[name].std().item(), abs=2 * allowed), name
        assert value.mean().item() == pytest.approx(reference[name].mean().item(), abs=5e-3), name


def test_initial_values_depend_on_seed_name_and_shape_alone() -> None:
    wide, narrow = build().model, build("model.make_vocab_size_divisible_by=7", "model.n_layer=1").model
    other = build("run.seed=99").model
    name = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(wide.weights.parameters()[name], narrow.weights.parameters()[name])
    assert not torch.equal(wide.weights.parameters()[name], other.weights.parameters()[name])
    rows = [m.weights.parameters()["transformer.wte.weight"] for m in (wide, narrow)]
    assert rows[0].shape[0] == 384
    assert rows[1].shape[0] == 301
    assert torch.equal(rows[0][:300], rows[1][:300])
    assert rows[0][300:].eq(0).all()


def test_trained_weights_open_in_transformers_with_equal_logits(workspace: Workspace) -> None:
    run = train(workspace.project, "out", "run.max_iters=3", size=2)
    folder = run.checkpoint(3)
    theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
    assert theirs.config.vocab_size == 320
    assert theirs.transformer.wte.weight.shape[0] == 320
    assert theirs.config.activation_function == "gelu_new"

    config = load_config(workspace.project, ["run.output_dir=elsewhere"])
    ours = Runner(None, config.run)
    ours.setup()
    build_model(config, ours, folder, for_training=False)
    ids = torch.randint(0, 320, (3, 16), generator=torch.Generator().manual_seed(0))
    with ours.evaluating():
        logits = ours.evaluate({"input_ids": ids})
    expected = theirs(ids).logits[:, -1]
    assert logits.shape == expected.shape
    # fp32 rounding of two forms of the same activation function.
    assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_pretrained_weights_are_loaded_under_either_naming(tmp_path: Path, prefix: str) -> None:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=300, resid_pdrop=0.0)
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + key.removeprefix("transformer."): value for key, value in weights.items()}
    renamed["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # a mask that old published folders carry as a weight
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})

    sizes = [f"model.{key}=null" for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "model_type")]
    ours = build(f"model.pretrained={tmp_path}", *sizes)
    ids = torch.randint(0, 300, (2, 10))
    with ours.evaluating():
        logits = ours.evaluate({"input_ids": ids})
    assert torch.allclose(logits, theirs(ids).logits[:, -1], rtol=1e-5, atol=1e-5)


def test_pickled_pretrained_weights_are_refused(tmp_path: Path) -> None:
    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=300).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="a pickle file of torch"):
        build(f"model.pretrained={tmp_path}", "model.n_layer=1")


def test_prepared_tokens_are_not_taken_for_pickled_weights(tmp_path: Path) -> None:
    for name in ("tokens.bin", "tokens.idx"):
        (tmp_path / name).touch()
    with pytest.raises(UserError) as refused:
        build(f"model.pretrained={tmp_path}", "model.n_layer=1")
    assert "pickle" not in str(refused.value)


def test_constructing_draws_no_random_numbers() -> None:
    config = load_config("projects/quickstart.yaml")
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    with parameters_on_meta():
        model = make_model(config)
    materialize(model, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.lm.lm_head.weight is model.lm.transformer.wte.weight
    fill_initial(model, [], 0)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
def test_data_of_another_tokenizer_than_the_weights_is_refused(workspace: Workspace) -> None:
    """Whether training begins from a folder of weights or goes on from a run."""
    weights = train(workspace.project, "first", "run.max_iters=1").checkpoint(1)
    begins = {"second": f"model.pretrained={weights}", "third": f"run.resume_from={weights}"}
    workspace.train("same", begins["second"], "run.max_iters=1")
    texts = [" ".join(f"other{i}" for i in range(k, k + 60)) for k in range(30)]
    source = json_lines(workspace.path / "t.jsonl", texts)
    prepare(PrepareOptions(input=str(source), train_tokenizer=320), workspace.path / "other", False)
    for name, begin in begins.items():
        run = workspace.train(name, begin, f"datasets.tiny.path={workspace.path / 'other'}", fails=True)
        assert run.code == 1
        assert "the data was prepared with a different tokenizer than the weights in" in run.err
        assert "prepare the data with tokenizer=" in run.err
        assert "Traceback" not in run.err


@pytest.mark.parametrize("length", [None, 512])
def test_operations_are_counted_by_the_published_formula(length: int | None) -> None:
    sizes = {"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 64, "vocab_size": 1000}
    kind = registry.get("model", "gpt2")
    with parameters_on_meta():
        model = kind(kind.Options(**sizes))
    matrices = 3 * 12 * 48**2 + 1000 * 48  # the padding of the vocabulary counts for nothing
    assert model.structure.flops_per_token(length) == 6 * matrices + 12 * 3 * 48 * (length or 64)
    kind = registry.get("model", "qwen")
    for family, width in (("qwen2", 12), ("qwen3", 16)):
        more = {"head_dim": 16} if family == "qwen3" else {}
        options = kind.Options(
            family=family,
            vocab_size=1000,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **more,
        )
        with parameters_on_meta():
            model = kind(options)
        layer = 48 * (2 * 4 * width + 2 * 2 * width + 3 * 64)
        attention = 12 * 3 * 4 * width * (length or 64)
        assert model.structure.flops_per_token(length) == 6 * (3 * layer + 1000 * 48) + attention
