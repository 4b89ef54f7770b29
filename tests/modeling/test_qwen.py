"""Qwen is transformers' own: sizes, initial values, weights in and out, and the same training under every runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.engine.build import make_model
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.utils.errors import CheckpointError, ConfigError
from fixtures_qwen import build, use
from fixtures_ranks import mostly_slow, train
from fixtures_training import TOLERANCE, assert_equal_training, follow, relative

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}
# The head here takes the last position alone. A product of another shape may sum in another order: differences of 4e-6
# were measured on an AMD EPYC, none on other processors.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


def written_by_transformers(folder: Path, family: str) -> Any:
    """A tiny model of the family, saved in `folder` by transformers itself."""
    config, model, more = FAMILIES[family]
    torch.manual_seed(0)
    theirs = model(config(**SIZES, **more)).eval()
    theirs.save_pretrained(folder)
    return theirs


def some_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 320, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("0.5b", 494_032_768), ("1.5b", 1_543_714_304), ("3b", 3_085_938_688), ("7b", 7_615_616_512),
        ("qwen3_0.6b", 596_049_920), ("qwen3_1.7b", 1_720_574_976), ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
    ],
)  # fmt: skip
def test_published_sizes_have_the_published_numbers_of_parameters(workspace: Workspace, size: str, count: int) -> None:
    config = load_config(use(workspace, model_type=size).project, [])
    with parameters_on_meta():
        model = make_model(config)
    shapes = [model.weights.logical_shape(name, p.shape) for name, p in model.weights.parameters().items()]
    assert sum(shape.numel() for shape in shapes) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_have_the_distributions_of_transformers(workspace: Workspace, family: str) -> None:
    config, make, more = FAMILIES[family]
    sizes = SIZES | {"hidden_size": 256, "vocab_size": 4000} | more
    ours = build(use(workspace, family=family, **sizes)).model
    theirs = make(config(**sizes))
    reference = dict(theirs.named_parameters())
    parameters = ours.weights.parameters()
    assert parameters.keys() == reference.keys()
    for name, parameter in parameters.items():
        value = parameter[: reference[name].shape[0]]
        # Five standard errors of a standard deviation estimated from n normal values, on either side.
        allowed = 10 * reference[name].std().item() / (2 * value.numel()) ** 0.5 + 1e-12
        assert value.std().item() == pytest.approx(reference[name].std().item(), abs=allowed), name
        assert value.mean().item() == pytest.approx(reference[name].mean().item(), abs=5e-3), name


@pytest.mark.parametrize("family", FAMILIES)
def test_pretrained_folders_open_with_equal_logits_and_losses(
    workspace: Workspace, tmp_path: Path, family: str
) -> None:
    theirs = written_by_transformers(tmp_path / "base", family)
    ours = build(use(workspace, pretrained=str(tmp_path / "base")))
    ids = some_ids(3, 17)
    assert ours.model.lm.model.embed_tokens.weight.shape[0] == 384, "padded"
    with ours.evaluating():
        logits = ours.evaluate({"input_ids": ids})
        loss = ours.evaluate({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
    expected = theirs(ids, labels=ids)
    assert torch.allclose(logits, expected.logits[:, -1], **ROUNDING)
    assert loss.item() / (3 * 16) == pytest.approx(expected.loss.item(), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_changes_nothing(workspace: Workspace, family: str) -> None:
    ours = build(use(workspace, family=family, **SIZES))
    ids = some_ids(2, 9)
    with ours.evaluating():
        cache = ours.model.new_cache()
        for stop, start in ((5, 0), (8, 5), (9, 8)):
            logits = ours.evaluate({"input_ids": ids[:, start:stop], "cache": cache})
        # Attention over one query and over nine takes another path through the same sums.
        assert torch.allclose(logits, ours.evaluate({"input_ids": ids}), atol=1e-5)


def test_embeddings_masks_and_positions_do_for_tokens(workspace: Workspace) -> None:
    ours = build(use(workspace, **SIZES))
    ids = some_ids(1, 9)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)  # on the left, and not to be seen
    mask = (torch.arange(12) >= 3).long()[None]
    with ours.evaluating():
        plain = ours.evaluate({"input_ids": ids})
        embeddings = ours.model.embed(padded)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        other = ours.evaluate({"inputs_embeds": embeddings, "attention_mask": mask, "position_ids": positions})
    assert torch.allclose(plain, other, atol=1e-5)


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["qwen2"]))
def test_checkpoints_open_in_transformers_with_equal_logits(workspace: Workspace, family: str) -> None:
    use(workspace, family=family, **SIZES, **FAMILIES[family][2])
    run = train(workspace.project, "out", "run.max_iters=3", "run.global_batch_size=4")
    theirs = AutoModelForCausalLM.from_pretrained(run.checkpoint(3)).eval()
    assert isinstance(theirs, FAMILIES[family][1])
    ours = build(workspace, run.checkpoint(3))
    ids = some_ids(2, 11)
    with ours.evaluating():
        assert torch.allclose(ours.evaluate({"input_ids": ids}), theirs(ids).logits[:, -1], **ROUNDING)


@pytest.fixture(scope="module", params=mostly_slow(FAMILIES, []))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    family = request.param
    workspace = use(Workspace(tmp_path_factory.mktemp(family), dataset), family=family, **SIZES, **FAMILIES[family][2])
    options = ("run.max_iters=12", "run.micro_batch_size=2", "run.init_lr=3e-3")
    return workspace, options, follow(workspace, "ddp@1", *options)


@pytest.mark.parametrize("name", mostly_slow(["ddp@2", "fsdp@2", "zero1@2", "zero2@2", "zero3@2"], []))
def test_every_runner_trains_alike(reference: Any, name: str) -> None:
    workspace, options, one = reference
    assert relative(one.column("loss")[-1:], one.column("loss")[:1]) > 0.01, "nothing was learned"
    assert_equal_training(one, follow(workspace, name, *options), TOLERANCE)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"head_dim": 16}, "model.head_dim: qwen2 does not have this option"),
        ({"num_key_value_heads": 3}, "model.num_key_value_heads: 3 does not divide num_attention_heads=4 evenly"),
        ({"hidden_size": 30}, "model.num_attention_heads: 4 does not divide hidden_size=30 evenly"),
    ],
)
def test_sizes_that_do_not_go_together(workspace: Workspace, model: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_model(load_config(use(workspace, **SIZES | model).project, []))


def test_another_kind_of_pretrained_folder_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="is of type 'gpt2'; known: qwen2, qwen3"):
        build(use(workspace, pretrained=str(tmp_path / "gpt2")))
    with pytest.raises(CheckpointError, match="not a folder, and cannot be downloaded from the Hugging Face Hub"):
        build(use(workspace, pretrained="no-such-owner/no-such-model"))
