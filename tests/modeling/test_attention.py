"""Documents that share a sequence do not see each other: their losses, gradients and hidden states are as if apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from crosstrain_plugins.builtin.models.hugging_face import attention as attention_module
from torch import Tensor

import fixtures_flash
from conftest import Workspace
from crosstrain.config.registry import registry
from crosstrain.modeling import activation_checkpointing
from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.modeling.base import Model
from crosstrain.utils.errors import ConfigError
from crosstrain.utils.types import IGNORE_INDEX
from fixtures_families import tiny
from fixtures_qwen import use
from fixtures_ranks import mostly_slow
from fixtures_training import PLUGINS, TOLERANCE, assert_equal_training, follow

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "dropout": 0.0}),
    "qwen": ("qwen", SIZES),
    "llama": ("causal_lm", {"config": {"model_type": "llama", **SIZES}}),
    "windows": ("causal_lm", {"config": {"model_type": "mistral", "sliding_window": 8, **SIZES}}),
    "some windows": (
        "causal_lm", {"config": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8, **SIZES}},
    ),
    "gated delta rule": ("causal_lm", {"config": tiny("qwen3_5_text")}),
    "mamba 2": ("causal_lm", {"config": tiny("mamba2")}),
    "mamba 2 between attention": ("causal_lm", {"config": tiny("nemotron_h")}),
}  # fmt: skip
FLASH_2, FLASH_3 = "kernels-community/flash-attn2", "kernels-community/flash-attn3"
LENGTHS = [[13, 27, 24], [30, 34]]  # documents of two rows

ROUNDING = 2e-7  # of a sum in fp32, whose epsilon is 1.2e-7: where the true gradient is 0, as of keys of a single token


def build(name: str, **more: Any) -> Model:
    kind, options = MODELS[name]
    component = registry.get("model", kind)
    torch.manual_seed(0)
    model = component(component.Options(**options, **more))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def packed() -> dict[str, Tensor]:
    ids = torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(1))
    labels, positions = torch.roll(ids, -1, 1), torch.empty_like(ids)
    for row, lengths in enumerate(LENGTHS):
        positions[row] = torch.cat([torch.arange(n) for n in lengths])
        labels[row, torch.tensor(lengths).cumsum(0) - 1] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def apart() -> list[dict[str, Tensor]]:
    batch = packed()
    return [
        {key: part[None] for key, part in zip(batch, parts, strict=True)}
        for row, lengths in enumerate(LENGTHS)
        for parts in zip(*(tensor[row].split(lengths) for tensor in batch.values()), strict=True)
    ]


def gradients(model: Model, batches: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    losses = [model(**batch) for batch in batches]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.fixture
def kernels() -> Iterator[None]:
    """A machine that has the kernels: their arguments decide what is computed."""
    with ExitStack() as stack:
        for patched in fixtures_flash.on_cpu():
            stack.enter_context(patched)
        yield


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, None if name == "mamba 2" else "sdpa") for name in MODELS),
        *((name, "eager") for name in ("gpt2", "qwen", "llama")),
        *((name, kernel) for name in ("qwen", "llama", "windows", "some windows") for kernel in (FLASH_2, FLASH_3)),
    ],
)
def test_a_packed_loss_and_its_gradients_are_those_of_the_documents_apart(
    name: str, attention: str | None, kernels: None
) -> None:
    model = build(name, attention=attention)
    model.structure.check_documents()
    loss, gradient = gradients(model, [packed()])
    expected, expected_gradient = gradients(model, apart())
    assert loss == pytest.approx(expected, rel=1e-6)
    largest = max(value.norm() for value in expected_gradient.values())
    for parameter, value in expected_gradient.items():  # fp32 sums in another order; keys' biases have no gradient
        assert (gradient[parameter] - value).norm() <= 5e-6 * value.norm() + ROUNDING * largest, parameter


@pytest.mark.parametrize("length", [1, 37, 64])
@pytest.mark.parametrize("attention", [FLASH_2, FLASH_3])
def test_whole_rows_have_the_loss_and_gradients_of_sdpa(attention: str, length: int, kernels: None) -> None:
    batch = {key: value[:, :length] for key, value in packed().items() if key != "position_ids"}
    loss, gradient = gradients(build("qwen", attention=attention), [batch])
    expected, expected_gradient = gradients(build("qwen"), [batch])
    assert loss == pytest.approx(expected, rel=1e-6)
    largest = max(value.norm() for value in expected_gradient.values())
    for parameter, value in expected_gradient.items():  # fp32 sums in another order; keys' biases have no gradient
        assert (gradient[parameter] - value).norm() <= 5e-6 * value.norm() + ROUNDING * largest, parameter


def test_kernels_are_told_of_documents_and_dropout(kernels: None) -> None:
    model = build("qwen", attention=FLASH_2, attention_dropout=0.25)
    (calls := fixtures_flash.CALLS).clear()
    model(**packed())
    model.eval()
    model(**packed())
    told = {"cu_seqlens": [0, 13, 40, 64, 94, 128], "longest": 34}
    assert calls == [told | {"dropout_p": 0.25}] * 3 + [told | {"dropout_p": 0.0}] * 3


@pytest.mark.parametrize("attention", [FLASH_3])
def test_kernels_without_dropout_refuse_it(attention: str, kernels: None) -> None:
    model = build("qwen", attention=attention, attention_dropout=0.25)
    with pytest.raises(ConfigError, match=r"does not support dropout, but the model's rate is 0\.25; set it to 0"):
        model(**packed())


@pytest.mark.parametrize("attention", [FLASH_2])
def test_padded_batches_are_left_to_sdpa(attention: str, kernels: None) -> None:
    ids, seen = packed()["input_ids"], torch.ones(2, 64, dtype=torch.long)
    seen[0, :20] = 0  # padding on the left, as in a batch that generates
    given = {"input_ids": ids, "attention_mask": seen, "position_ids": (seen.cumsum(1) - 1).clamp(min=0)}
    logits = [build("qwen", attention=name).eval()(**given) for name in (attention, "sdpa")]
    assert torch.equal(*logits)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("attention", [FLASH_2])
def test_blocks_that_are_computed_again_have_the_same_gradients(attention: str, mode: Mode, kernels: None) -> None:
    expected, expected_gradient = gradients(build("qwen", attention=attention), [packed()])
    model = build("qwen", attention=attention)
    activation_checkpointing.apply(model.blocks(), mode, nullcontext)
    loss, gradient = gradients(model, [packed()])
    assert loss == expected
    for parameter, value in expected_gradient.items():
        torch.testing.assert_close(gradient[parameter], value, rtol=0, atol=0, msg=parameter)


@pytest.mark.parametrize(
    ("attention", "package"),
    [("flash_attention_2", "flash-attn"), ("flash_attention_3", "flash-attn-3"), (FLASH_2, "kernels")],
)
def test_what_is_missing_is_said(attention: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"{attention} needs a CUDA GPU and the package {package}; use sdpa"):
        build("qwen", attention=attention)


def test_a_kernel_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_missing", lambda flash: None)
    with pytest.raises(ConfigError, match=r"vllm-flash-attn3 cannot be loaded; use sdpa \(.+\)"):
        build("qwen", attention="kernels-community/vllm-flash-attn3")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [FLASH_2])
@pytest.mark.parametrize("runner", ["ddp@4/2", "fsdp@2/2", "zero3@2/1", "megatron_tp2@4/2", "megatron_pp2@2/1"])
def test_kernels_train_as_sdpa_does_in_one_process(workspace: Workspace, kernel: str, runner: str) -> None:
    layout, _, sharing = runner.partition("/")
    options = (
        f"run.plugins=[{PLUGINS}]", "datasets.tiny.document_mask=true", "datasets.tiny.seq_length=31",
        "run.max_iters=6", "run.micro_batch_size=2", "run.global_batch_size=8", "run.amp=fp32",
        "run.optimizer={name: sgd, momentum: 0.9}", "run.init_lr=0.03", "run.grad_norm_clip=0",
    )  # fmt: skip
    use(workspace, **(SIZES | {"vocab_size": 320}))
    one = follow(workspace, "ddp@1", *options)
    use(workspace, **(SIZES | {"vocab_size": 320, "arch": "qwen_flash_on_cpu", "attention": kernel}))
    sharing = f"run.runner.context_parallel={sharing}"
    assert_equal_training(one, follow(workspace, layout, *options, sharing, label="kernel"), TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_a_changed_document_leaves_the_others_bit_identical(name: str) -> None:
    model = build(name)
    seen: list[Tensor] = []
    model.lm.base_model.register_forward_hook(lambda _m, _a, out: seen.append(out.last_hidden_state))  # type: ignore[union-attr, operator]
    batch = packed()
    model(**batch)
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][0, 5] += 1
    model(**batch)
    before, after = seen
    assert not torch.equal(before[0, 5:13], after[0, 5:13])
    assert torch.equal(before[0, 13:], after[0, 13:])
    assert torch.equal(before[1], after[1])


def test_blocks_that_ignore_documents_are_refused() -> None:
    model = build("llama")
    attend = type(model.blocks()[0].self_attn).forward
    model.blocks()[1].self_attn.forward = lambda *args, documents=None, attention_mask=None, **kwargs: attend(  # type: ignore[union-attr]
        model.blocks()[1].self_attn, *args, attention_mask=None, **kwargs
    )
    with pytest.raises(ConfigError, match=r"block 1 \(LlamaDecoderLayer\) ignores document boundaries"):
        model(**packed())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tiny("mamba"), "mamba cannot keep documents apart: it takes no position_ids, or its layers cross boundaries"),
        (tiny("jamba"), "jamba cannot keep documents apart"),
        (tiny("rwkv"), "rwkv cannot keep documents apart"),
        ({"model_type": "gemma2", **SIZES, "head_dim": 8, "sliding_window": 8}, "eager cannot keep documents apart"),
    ],
)
def test_models_that_cannot_keep_documents_apart_are_refused(config: dict[str, Any], reason: str) -> None:
    component = registry.get("model", "causal_lm")
    with pytest.raises(ConfigError, match=reason):
        component(component.Options(config=config)).structure.check_documents()


@pytest.mark.parametrize(
    "runner",
    mostly_slow(
        ["ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron_tp2@2", "megatron_tp2_sp@2", "megatron_pp2@2",
         "megatron_tp2_pp2_sp@4"],
        [],
    ),
)  # fmt: skip
def test_training_on_documents_is_equal_under_every_runner(workspace: Workspace, runner: str) -> None:
    options = (
        "datasets.tiny.document_mask=true", "datasets.tiny.seq_length=32", "model.dropout=0", "run.max_iters=6",
        "run.micro_batch_size=2", "run.global_batch_size=8", "run.gradient_checkpointing=full",
    )  # fmt: skip
    assert_equal_training(follow(workspace, "ddp@1", *options), follow(workspace, runner, *options), TOLERANCE)
