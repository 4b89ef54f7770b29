"""`crosstrain compare` finds what is wrong with a runner, and says so; and that nothing is, where nothing is."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from crosstrain_plugins.builtin.commands.compare.compare import make_contestants
from crosstrain_plugins.builtin.commands.compare.diagnosis import diagnose
from crosstrain_plugins.builtin.commands.compare.forward import Activations
from crosstrain_plugins.builtin.commands.compare.tolerance import Tolerance

from conftest import Workspace
from crosstrain import registry
from crosstrain.distributed.group import Group
from crosstrain.modeling import activation_checkpointing
from fixtures_families import tiny
from fixtures_processes import program
from fixtures_ranks import mostly_slow
from fixtures_training import compare, project

FOUND = {
    "dropout": "random numbers (dropout) differ",
    "tied": "transformer.wte.weight differs (2 times the reference's): a tied weight, which is counted once for each",
    "missing": "the ranks hold different gradients of transformer.",
    "partly_missing": "the ranks hold different gradients of transformer.h.1.mlp.c_",
    "schedule": "the schedule must advance once for each applied step",
    "sum": "every gradient is 2 times the reference's: they are summed over the 2 data-parallel ranks",
    "clipping": "it is 0.1 times the reference's: clipping",
    "decay": "weight decay: different parameters decay",
    "forgets": "a checkpoint, lacks exp_avg of transformer.h.0.attn.c_attn.bias and 53 more",
    "says": "although its gradients agree: it is summed over the 2 data-parallel ranks",
    "stale": "the ranks hold different weights of transformer.ln_f.weight (only on rank 1)",
    "averages": "it is averaged over micro batches, not over targets",
    "last": "it has only the first micro batch of each rank",
    "late": "in step 4 the gradient of transformer.h.0.ln_2.weight differs (1.01 times the reference's)",
    "forgets_at_resume": "is not what was saved: it starts at zero",
    "bf16_masters": "weights are kept in bfloat16",
    "evaluates": "after training the loss in evaluation mode",
}


FEW = ("tied", "missing")


@pytest.mark.parametrize("bugs", mostly_slow([FEW, tuple(FOUND)], []))
def test_planted_bugs_are_named_and_healthy_runners_pass(workspace: Workspace, bugs: tuple[str, ...]) -> None:
    wrong = {bug: f"{{name: wrong, bug: {bug}}}@2" for bug in bugs}
    done = compare(workspace, "ddp@1", "wrong@2", *wrong.values(), options=("model.dropout=0.1",), flags=("--deep",))

    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {len(bugs)} of {len(bugs) + 1} do not train like ddp@1: ")
    assert "wrong@2\n" in done.stdout
    results = json.loads((workspace.path / "compare.json").read_text())
    assert results["wrong@2"]["finding"] is None
    for bug in bugs:
        assert FOUND[bug] in results[wrong[bug]]["finding"]["sentence"], bug


@pytest.mark.slow
def test_a_balance_of_micro_batches_is_named(workspace: Workspace) -> None:
    config = tiny("qwen3_moe") | {"vocab_size": 320, "num_experts": 4, "initializer_range": 0.2}
    project(workspace, {"arch": "causal_lm", "config": config, "router_loss_coef": 0.1})
    done = compare(workspace, "ddp@1", "unbalanced@2", wrong := "{name: unbalanced, micro_batches: true}@2")
    results = json.loads((workspace.path / "compare.json").read_text())
    assert results["unbalanced@2"].get("finding", "") is None, done.stdout + done.stderr
    said = results[wrong]["finding"]["sentence"]
    assert "from equal logits: means over different tokens" in said


@pytest.mark.slow
def test_a_tie_of_experts_that_a_rounding_flips_is_named(workspace: Workspace) -> None:
    config = tiny("qwen3_moe") | {"vocab_size": 320, "num_experts": 4, "initializer_range": 0.2}
    project(workspace, {"arch": "causal_lm", "config": config})
    done = compare(workspace, "tied@1", "{name: tied, rounded: true}@1")
    results = json.loads((workspace.path / "compare.json").read_text())
    said = results["{name: tied, rounded: true}@1"]["finding"]["sentence"]
    assert done.returncode == 1
    assert re.search(r"routing differs at layer 0, token \d+ of sample \d+, by a margin of \d\.\de[-+]\d+", said), said
    assert said.endswith("a tie that rounding decides, not a wrong gradient")


def record(gradient: float) -> dict[str, Any]:
    """A step of a model with the parameters a and b, where b's gradient has this number."""
    row = {"step": 1, "samples": 4, "loss": 1.0, "grad_norm": 1.0}
    empty = {"products": {}, "off": {}, "apart": {}, "copies": {}, "rounded": {}, "partial": [], "idle": []}
    gradients = empty | {"products": {"a": [0.0, 0.0, 1.0], "b": [gradient**2, 0.0, 0.0]}}
    step = {
        "gradients": gradients, "weights": empty, "data": {}, "rates": [0.1], "activations": {}, "training": True,
        "routing": {"near": {}, "loss": 0.0},
        "projections": {},
    }  # fmt: skip
    return {
        "rows": [row],
        "steps": [step],
        "plain_loss": 1.0,
        "plain_training": False,
        "names": ["a", "b"],
        "tied": [],
        "dp_size": 1,
        "context_size": 1,
        "accumulation": 1,
        "exact": True,
    }


def test_a_gradient_that_the_reference_lacks_is_named() -> None:
    reference = record(0.0)
    finding = diagnose(record(2.0), reference, Tolerance.of("fp32", reference, None))
    assert finding is not None
    assert (finding.phase, finding.parameters) == ("gradients", ["b"])
    assert finding.sentence.startswith("in step 1 the gradient of b differs (the reference's is zero)")
    assert diagnose(record(0.0), reference, Tolerance.of("fp32", reference, None)) is None


def test_losses_of_routers_are_not_random() -> None:
    reference = record(0.0)
    reference["rows"][0]["loss"] += 0.25
    tolerance = Tolerance.of("fp32", reference, None)
    assert tolerance.random(reference)
    reference["steps"][0]["routing"]["loss"] = 0.25
    assert not tolerance.random(reference)


def test_activations_of_two_micro_batches_are_measured_under_selective_checkpointing() -> None:
    found = []
    kind = registry.get("model", "gpt2")
    for mode in ("none", "selective"):
        torch.manual_seed(0)
        model = kind(kind.Options(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, dropout=0.0))
        activation_checkpointing.apply(model.blocks(), mode, nullcontext)
        seen = Activations(model, Group())
        for _ in range(2):
            tokens = torch.arange(8).view(1, 8)
            model(input_ids=tokens, labels=tokens).backward()
        found.append(seen.means())
    assert found[1].keys() == found[0].keys()
    for name, means in found[0].items():
        assert found[1][name][:2] == pytest.approx(means[:2])


@pytest.mark.slow
def test_a_warmup_hides_nothing(workspace: Workspace) -> None:
    """At this rate no loss shows what is wrong with the updates."""
    options = ("run.warmup_steps=100000", "run.lr_decay_iters=200000", "run.weight_decay=10")
    done = compare(workspace, "ddp@1", "wrong@2", "{name: wrong, bug: decay}@2", options=options)
    assert done.returncode == 1
    problems = [result.get("problem") for result in json.loads((workspace.path / "compare.json").read_text()).values()]
    assert "weight decay: different parameters decay" in problems.pop()
    assert set(problems) == {None}


def test_a_runner_in_braces_takes_nothing_from_the_projects(workspace: Workspace, tmp_path: Path) -> None:
    text = yaml.safe_load(workspace.project.read_text())
    text["run"] |= {"runner": {"name": "megatron", "pipeline_parallel": 2}, "global_batch_size": 4}
    loaded = make_contestants(text, (), ("megatron@2", "{name: megatron, tensor_parallel: 2}@2"), 1, tmp_path)
    found = [config.run.runner.options for _, _, config in loaded]
    assert [(each.tensor_parallel, each.pipeline_parallel) for each in found] == [(1, 2), (2, 1)]


@pytest.mark.slow
def test_engines_agree(workspace: Workspace) -> None:
    done = compare(workspace, "zero3@2", "fsdp@2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all train like zero3@2\n")
    assert done.stdout.count("trains alike") == 1


@pytest.mark.parametrize(
    ("runners", "sentence"),
    [
        (("ddp@1",), "--runners: expected at least two"),
        (("ddp@1", "zero2@x"), "and its number of workers such as zero2@2, got 'zero2@x'"),
        (("ddp@1", "{name: zero9, more: 1}@2"), "there is no runner called 'zero9'"),
        (("ddp@1", "ddp@3"), "global_batch_size: 8 is not a multiple of"),
    ],
)
def test_mistakes_are_one_sentence(workspace: Workspace, runners: tuple[str, ...], sentence: str) -> None:
    done = program(workspace.path, "compare", "--cfg-path", str(workspace.project), "--runners", *runners)
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert sentence in done.err
