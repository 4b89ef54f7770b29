"""`crosstrain compare` finds what is wrong with a runner, and says so; and that nothing is, where nothing is."""

from __future__ import annotations

import json
import re

import pytest

from conftest import Workspace
from crosstrain.comparison.diagnosis import Tolerance, diagnose
from fixtures_ranks import mostly_slow
from fixtures_training import compare

FOUND = {
    "dropout": "random numbers (dropout) differ",
    "tied": "transformer.wte.weight, a tied weight, is 2 times the reference's",
    "missing": "different gradients of transformer.wte.weight and 27 more parameters: a missing all-reduce",
    "partly_missing": "the ranks hold different gradients of transformer.h.1.mlp.c_fc.weight and 3 more",
    "schedule": "not for each micro batch (2 here)",
    "sum": "every gradient is 2 times the reference's: they were summed over the 2 data-parallel ranks",
    "clipping": "look at clipping, the optimizer",
    "forgets": "every checkpoint, lacks exp_avg of transformer.h.0.attn.c_attn.bias and 53 more",
    "says": "although its gradients agree: look at what forward_backward returns",
    "stale": "the ranks hold different weights of transformer.ln_f.weight",
}


FEW = ("tied", "missing")


@pytest.mark.parametrize("bugs", mostly_slow([FEW, tuple(FOUND)], []))
def test_planted_bugs_are_named_and_healthy_runners_pass(workspace: Workspace, bugs: tuple[str, ...]) -> None:
    wrong = {bug: f"{{name: wrong, bug: {bug}}}@2" for bug in bugs}
    done = compare(workspace, "ddp@1", "wrong@2", *wrong.values(), options=("model.dropout=0.1",))

    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {len(bugs)} of {len(bugs) + 1} do not train as ddp@1: ")
    assert "wrong@2\n" in done.stdout
    results = json.loads((workspace.path / "compare.json").read_text())
    assert results["wrong@2"]["problem"] is None
    for bug in bugs:
        assert FOUND[bug] in results[wrong[bug]]["problem"], bug


def test_a_gradient_that_the_reference_lacks_is_named() -> None:
    row = {"step": 1, "samples": 4, "loss": 1.0, "grad_norm": 1.0}
    common = {"rows": [row], "first_samples": [[0]], "plain_loss": 1.0, "names": ["a", "b"], "spread": {}, "tied": []}
    reference = common | {"gradients": [{"a": [0.0, 1.0, 1.0, 1.0], "b": [0.0, 0.0, 0.0, 0.0]}]}
    record = common | {"gradients": [{"a": [0.0, 1.0, 1.0, 1.0], "b": [4.0, 4.0, 0.0, 0.0]}]}
    problem = diagnose(record, reference, Tolerance.of("fp32"))
    assert problem == (
        "in step 1 the gradient of b differs first (by inf of its norm), 1 of 2 do, most that of b (by inf): the "
        "backward of that module"
    )


@pytest.mark.slow
def test_a_warmup_hides_nothing(workspace: Workspace) -> None:
    """At this rate no loss shows what is wrong with the updates."""
    options = ("run.warmup_steps=100000", "run.lr_decay_iters=200000", "run.weight_decay=10")
    done = compare(workspace, "ddp@1", "wrong@2", "{name: wrong, bug: decay}@2", options=options)
    assert done.returncode == 1
    problems = [result.get("problem") for result in json.loads((workspace.path / "compare.json").read_text()).values()]
    assert "look at the optimizer's groups (decay)" in problems.pop()
    assert set(problems) == {None}


@pytest.mark.slow
def test_engines_agree(workspace: Workspace) -> None:
    done = compare(workspace, "zero3@2", "fsdp@2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all train as zero3@2\n")
    assert done.stdout.count("trains alike") == 1


@pytest.mark.parametrize(
    ("runners", "sentence"),
    [
        (("ddp@1",), "--runners: name at least two"),
        (("ddp@1", "zero2@x"), "'zero2@x' is not a runner"),
        (("ddp@1", "{name: zero9, more: 1}@2"), "there is no runner called 'zero9'"),
        (("ddp@1", "ddp@3"), "global_batch_size: 8 is not a multiple of"),
    ],
)
def test_mistakes_are_one_sentence(workspace: Workspace, runners: tuple[str, ...], sentence: str) -> None:
    done = compare(workspace, *runners)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr


@pytest.mark.slow
def test_no_library_warns_under_any_runner(workspace: Workspace) -> None:
    runners = ("ddp@1", "ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron_tp2@2")
    done = compare(workspace, *runners, options=("model.dropout=0",))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("warn|deprecat", done.stdout + done.stderr, re.IGNORECASE)
