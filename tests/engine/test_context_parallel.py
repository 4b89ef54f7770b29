"""Ranks that share sequences train, evaluate and save as one process does."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fixtures_flash
from conftest import Workspace
from crosstrain import ConfigError, ContextOptions, Runner, RunOptions, registry
from crosstrain.config.load import load_config
from crosstrain.engine.checks import batch_plan
from crosstrain.modeling.context import Context
from fixtures_families import BUILDS, REFUSED, tiny
from fixtures_qwen import use
from fixtures_ranks import mostly_slow, run_ranks, train
from fixtures_training import (
    COMMON,
    GRADIENT_TOLERANCE,
    SETTINGS,
    TOLERANCE,
    Followed,
    assert_equal_training,
    compare,
    follow,
    relative,
)

PLAIN = ("model.dropout=0", "run.amp=fp32")
SGD = ("run.optimizer={name: sgd, momentum: 0.9}", "run.init_lr=0.03", "run.grad_norm_clip=0")
# Documents in rows of 31 tokens: no number of ranks divides them.
UNEVEN = ("datasets.tiny.seq_length=31", "datasets.tiny.document_mask=true")
QWEN: dict[str, Any] = {  # whose heads of keys are fewer than four ranks, and than two that are tensor parallel, too
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def shared(workspace: Workspace, layout: str, *options: str, label: str = "run") -> Followed:
    """Train under a runner, such as zero3@4/2: 4 ranks, of which 2 share each sequence."""
    name, _, sharing = layout.partition("/")
    return follow(workspace, name, *options, f"run.runner.context_parallel={sharing}", label=f"{label}{sharing}")


def test_two_ranks_that_share_sequences_train_as_one(workspace: Workspace) -> None:
    options = (*COMMON, *SETTINGS["adamw"], *PLAIN, *UNEVEN)
    one = follow(workspace, "ddp@1", *options)
    assert_equal_training(one, shared(workspace, "ddp@2/2", *options), TOLERANCE)


# Models with heads that the ranks do not divide, or with windows: rows of 31 tokens are longer than a window of 8, and
# some of its queries see keys of two other ranks.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "3 heads": ("qwen", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}),
    "5 heads": ("qwen", {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80}),
    "6 heads": ("qwen", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}),
    "windows": ("mistral", {"num_attention_heads": 8, "num_key_value_heads": 1, "sliding_window": 8}),
    "5 heads with windows": (
        "mistral", {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80, "sliding_window": 8},
    ),
    "a window in one of two blocks": (
        "qwen2", {
            "num_attention_heads": 6, "hidden_size": 96, "use_sliding_window": True, "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "a gated delta rule": (
        "qwen3_5_text", {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
}  # fmt: skip


def use_heads(workspace: Workspace, heads: str) -> None:
    kind, sizes = HEADS[heads]
    sizes = QWEN | sizes
    use(workspace, **({"arch": "causal_lm", "config": {"model_type": kind, **sizes}} if kind != "qwen" else sizes))


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [
            ("3 heads", "ddp@2/2"), ("3 heads", "ddp@4/2"), ("3 heads", "fsdp@2/2"), ("5 heads", "ddp@3/3"),
            ("5 heads", "zero1@3/3"), ("5 heads", "fsdp@6/3"), ("6 heads", "ddp@4/4"), ("6 heads", "zero3@4/4"),
            ("6 heads", "megatron_tp2@4/2"), ("6 heads", "megatron_tp2_sp@4/2"), ("6 heads", "megatron_pp2@8/4"),
            ("windows", "ddp@2/2"), ("windows", "fsdp@4/4"), ("windows", "megatron_pp2@4/2"),
            ("5 heads with windows", "ddp@3/3"), ("5 heads with windows", "zero2@4/4"),
            ("a window in one of two blocks", "ddp@4/4"), ("a window in one of two blocks", "megatron_tp2@4/2"),
            ("a gated delta rule", "ddp@2/1"), ("a gated delta rule", "zero2@2/1"),
        ],
        [("5 heads", "ddp@3/3"), ("5 heads with windows", "ddp@3/3")],
    ),
)  # fmt: skip
def test_any_number_of_heads_and_windows_train_as_in_one_process(workspace: Workspace, case: tuple[str, str]) -> None:
    heads, layout = case
    use_heads(workspace, heads)
    options = (*COMMON, *SGD, *UNEVEN, "run.max_iters=12")  # rounding grows fast: 20 steps make 7e-8 of a norm 2e-6
    one = follow(workspace, "ddp@1", *options)
    assert one.column("loss")[-1] < 0.9 * one.column("loss")[0], "nothing was learned, so nothing was compared"
    assert_equal_training(one, shared(workspace, layout, *options), TOLERANCE)


# Under AdamW rounding grows fast in Qwen (test_megatron has how fast), so GPT-2 is trained by it.
@pytest.fixture(scope="module", params=["adamw", "sgd"])
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    workspace = Workspace(tmp_path_factory.mktemp("shared"), dataset)
    if request.param == "adamw":
        options = (*COMMON, *SETTINGS["adamw"], *PLAIN, *UNEVEN, "model.n_head=8")
    else:
        options = (*COMMON, *SGD, *UNEVEN)
        use(workspace, **QWEN)
    run = follow(workspace, "ddp@1", *options)
    assert run.column("loss")[-1] < 0.8 * run.column("loss")[0], "nothing was learned, so nothing was compared"
    return workspace, options, run


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp@2/2", "ddp@3/3", "fsdp@4/2"])
def test_recurrent_layers_train_as_in_one_process(workspace: Workspace, layout: str) -> None:
    use_heads(workspace, "a gated delta rule")
    options = (*COMMON, *SGD, *UNEVEN, "run.max_iters=12")
    one, other = follow(workspace, "ddp@1", *options), shared(workspace, layout, *options)
    for key in ("loss", "grad_norm"):
        assert relative(other.column(key), one.column(key)) < TOLERANCE
    # Parts of a decay's few gradients cancel, so single tensors are off by more than GRADIENT_TOLERANCE: fp32 rounds
    # the parts on each rank. All gradients together are compared.
    ours, theirs = (np.concatenate([run.gradients[name].ravel() for name in one.gradients]) for run in (other, one))
    assert np.linalg.norm(ours - theirs) <= GRADIENT_TOLERANCE * np.linalg.norm(theirs)


@pytest.mark.slow
def test_zero_3_refuses_recurrent_layers_that_compute_documents_one_by_one(workspace: Workspace) -> None:
    use_heads(workspace, "a gated delta rule")
    with pytest.raises(AssertionError, match=r"stage: 3 cannot gather the weights of Qwen3_5GatedDelta"):
        train(workspace.project, "refused", *COMMON, *UNEVEN, "run.runner=zero3", "run.max_iters=1", size=2)
    train(workspace.project, "whole", *COMMON, "run.runner=zero3", "run.max_iters=1", size=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [
    "ddp@2/2", "ddp@4/2", "ddp@4/4", "fsdp@2/2", "fsdp@4/2", "fsdp@4/4", "zero0@2/2", "zero1@4/2", "zero1@4/4",
    "zero2@4/2", "zero3@4/2", "zero3@4/4", "megatron_tp2@4/2", "megatron_tp2@8/4", "megatron_tp2_sp@4/2",
    "megatron_tp2_zero1@8/2", "megatron_tp2_fsdp@8/2", "megatron_pp2@4/2", "megatron_pp2@8/2", "megatron_pp2@8/4",
])  # fmt: skip
def test_every_runner_trains_as_one_process(reference: Any, layout: str) -> None:
    workspace, options, one = reference
    assert_equal_training(one, shared(workspace, layout, *options), TOLERANCE)


@pytest.mark.slow
def test_a_run_goes_on_under_any_number_of_sharing_ranks(workspace: Workspace) -> None:
    options = (
        *COMMON, *SETTINGS["adamw"], *PLAIN, *UNEVEN, "model.n_head=4", "run.lr_decay_iters=20", "run.eval_interval=5",
        "run.eval_iters=2", "run.metrics=[accuracy]", "run.sample_prompts=[ban der]", "run.sample_tokens=5",
    )  # fmt: skip
    one = train(workspace.project, "one", *options)
    for steps, layout in ((5, "ddp@1/1"), (10, "fsdp@2/2"), (15, "megatron_tp2@4/2"), (20, "zero3@4/4")):
        name, size, sharing = re.split("[@/]", layout)
        now = (f"run.runner={name}", f"run.runner.context_parallel={sharing}", f"run.max_iters={steps}")
        many = train(workspace.project, "many", *options, *now, size=int(size))
    assert many.column("step") == one.column("step")
    for key in ("loss", "val_loss", "val_accuracy"):
        here, there = ([row[key] for row in run.rows if key in row] for run in (many, one))
        assert relative(here, there) < TOLERANCE
    here, there = ([row["generated"] for row in run.rows if "generated" in row] for run in (many, one))
    assert here == there
    assert len(here) == 4


FOUND = {
    "mask": "the first difference is the input of transformer.h.0.attn.c_proj, after transformer.h.0.attn.c_attn",
    "labels": "no module's output differs, only the loss: its targets",
    "averaged": "every gradient is 0.5 times the reference's: they are averaged over the 2 context-parallel ranks",
}


@pytest.mark.slow
def test_planted_bugs_are_named(workspace: Workspace) -> None:
    runners = {bug: f"{{name: shares_wrongly, context_parallel: 2, bug: {bug}}}@2" for bug in ("none", *FOUND)}
    done = compare(workspace, "ddp@1", *runners.values(), options=PLAIN, flags=("--deep",))
    assert done.returncode == 1, done.stderr
    results = json.loads((workspace.path / "compare.json").read_text())
    assert results[runners["none"]]["finding"] is None
    for bug, said in FOUND.items():
        assert said in results[runners[bug]]["finding"]["sentence"], bug


# ---- memory


def _kept() -> tuple[int, int]:
    """Bytes that a forward keeps for the backward, parameters not counted, on one rank and on one of two."""
    runner = Runner(ContextOptions(2), RunOptions(output_dir="o", max_iters=1, global_batch_size=1))
    runner.setup()
    kind = registry.get("model", "qwen")
    model = kind(kind.Options(**QWEN | {"max_position_embeddings": 512}))
    ids = torch.randint(0, 320, (2, 511))
    found = []
    for group in (None, runner.context.process_group):
        model.context = None if group is None else Context(group)
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=ids)
        loss.backward()
        found.append(sum(seen.values()))
    return found[0], found[1]


@pytest.mark.slow
def test_two_ranks_keep_half_of_the_activations() -> None:
    for whole, part in run_ranks(2, _kept):
        assert part <= 0.6 * whole


# ---- models

# Of all gradients' norm. fp32 sums are in another order, which moves gradients of experts by up to 4e-5. A mask or a
# position that is lost makes 1e-2 and more.
GRADIENT = 1e-4


def _families(names: list[str], ranks: int) -> dict[str, str]:
    """How each family computes on ranks that share sequences: as one rank does, refused, or another way."""
    runner = Runner(ContextOptions(ranks), RunOptions(output_dir="o", max_iters=1, global_batch_size=1))
    runner.setup()
    assert runner.context.process_group is not None
    return {name: _family(name, Context(runner.context.process_group)) for name in names}


def _family(name: str, context: Context) -> str:
    kind = registry.get("model", "causal_lm")
    model = kind(kind.Options(config=tiny(name)))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    # Sums of parts are rounded differently. In fp64, no gradient is off by more than 2e-7; torch has no experts in it.
    model.eval().to(torch.float32 if model.structure.experts() else torch.float64)
    ids = torch.randint(3, 100, (2, 31))  # longer than a window of 16
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": torch.arange(31).repeat(2, 1)}
    batch["position_ids"][1, 20:] -= 20
    found = []
    try:
        model.structure.check_context(context.size)
        for model.context in (None, context):
            model.zero_grad()
            loss = model(**batch)
            loss.backward()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            found.append((loss.item(), torch.cat([gradient.flatten() for gradient in gradients])))
    except (ConfigError, RuntimeError) as error:  # the latter where attention of its own meets a mask without keys
        return f"refused: {error}"
    dist.all_reduce(found[1][1], group=context.group)
    far = abs(found[1][0] / found[0][0] - 1), float((found[1][1] - found[0][1]).norm() / found[0][1].norm())
    return "alike" if far[0] < 1e-6 and far[1] < GRADIENT else f"differs by {far}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])  # of 4 heads
def test_every_family_computes_alike_or_is_refused(ranks: int) -> None:
    families = [family for family in BUILDS if family not in REFUSED]
    one, *others = run_ranks(ranks, _families, families, ranks, seconds=600)
    assert all(other == one for other in others)
    verdicts = {name: verdict for name, verdict in one.items() if verdict != "alike"}
    assert {name for name, verdict in verdicts.items() if not verdict.startswith("refused")} == set()
    assert len(one) - len(verdicts) > 90


@pytest.mark.parametrize(
    ("model", "ranks", "sentence"),
    [
        (tiny("llama4_text"), 2, "ranks cannot share sequences of llama4_text"),  # its attention is chunked
        (tiny("doge"), 2, "ranks cannot share sequences of doge"),  # it changes transformers' masks
        (tiny("mamba"), 2, "ranks cannot share sequences of mamba"),
        (tiny("jamba"), 2, "ranks cannot share sequences of jamba"),  # transformers gives its layers no documents
    ],
)
def test_models_that_cannot_share_sequences_are_refused(model: dict[str, Any], ranks: int, sentence: str) -> None:
    kind = registry.get("model", "causal_lm")
    with pytest.raises(ConfigError, match=sentence):
        kind(kind.Options(config=model)).structure.check_context(ranks)


@pytest.mark.parametrize(
    ("options", "ranks", "sentence"),
    [
        (("run.runner={name: ddp, context_parallel: 2}",), 3, "context_parallel: 2 does not divide the 3 ranks"),
        (("run.runner=megatron_tp2_cp2",), 6, "tensor_parallel 2 x context_parallel 2 needs a multiple of 4 ranks"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    workspace: Workspace, options: tuple[str, ...], ranks: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        batch_plan(load_config(workspace.project, options), ranks)


# ---- kernels


def _flash(heads: int, ranks: int) -> list[float]:
    """How far flash attention's loss and gradients on ranks that share sequences are from sdpa's in one process."""
    runner = Runner(ContextOptions(ranks), RunOptions(output_dir="o", max_iters=1, global_batch_size=1))
    runner.setup()
    assert runner.context.process_group is not None
    sizes = QWEN | {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 8}
    ids = torch.randint(3, 100, (2, 31), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": torch.arange(31).repeat(2, 1)}
    batch["position_ids"][0, 3:] -= 3  # rows are cut at other places of documents
    batch["position_ids"][1, 20:] -= 20
    worst = []
    for window in (None, 8):
        found = []
        for attention in ("sdpa", "kernels-community/flash-attn2"):
            with ExitStack() as stack:
                for patched in fixtures_flash.on_cpu():
                    stack.enter_context(patched)
                config = sizes | {"model_type": "mistral", "sliding_window": window}
                model = (kind := registry.get("model", "causal_lm"))(kind.Options(config=config, attention=attention))
                torch.manual_seed(0)
                for parameter in model.parameters():
                    torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
                model.context = None if attention == "sdpa" else Context(runner.context.process_group)
                loss = model(**batch)
                loss.backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            if model.context is not None:
                dist.all_reduce(gradient, group=model.context.group)
            found.append((loss.item(), gradient))
        (one, expected), (other, gradient) = found
        worst += [abs(other / one - 1), float((gradient - expected).norm() / expected.norm())]
    return worst


def test_flash_attention_of_a_part_sees_its_documents_and_windows() -> None:
    for loss, gradient, loss_with_window, gradient_with_window in run_ranks(3, _flash, 5, 3):
        assert max(loss, loss_with_window) < TOLERANCE
        assert max(gradient, gradient_with_window) < GRADIENT_TOLERANCE
