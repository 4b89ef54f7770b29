"""Distillation: dense divergences once more, and a teacher of another size under every runner."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softmax

from conftest import Workspace
from crosstrain.config.registry import registry
from crosstrain.modeling.base import Model
from crosstrain.modeling.cross_entropy import Logits, token_cross_entropy
from crosstrain.utils.types import IGNORE_INDEX
from fixtures_ranks import mostly_slow, run_ranks, train
from fixtures_training import Followed, assert_equal_training, follow

TOLERANCE = 1e-6  # the same formulas in fp64 and in slices
TOLERANCE_OF_RUNNERS = 5e-6  # sums in another order, amplified by AdamW over 6 steps
KINDS = ("forward", "reverse", "jensen_shannon")


def dense(kind: str, student: Tensor, teacher: Tensor, temperature: float, beta: float) -> Tensor:
    """Divergences [n] by torch's own function, from whole distributions."""
    p, q = softmax(teacher / temperature, -1), softmax(student / temperature, -1)
    if kind == "forward":
        found = kl_div(q.log(), p, reduction="none").sum(-1)
    elif kind == "reverse":
        found = kl_div(p.log(), q, reduction="none").sum(-1)
    else:
        m = beta * p + (1 - beta) * q
        found = beta * kl_div(m.log(), p, reduction="none").sum(-1)
        found = found + (1 - beta) * kl_div(m.log(), q, reduction="none").sum(-1)
    return found * temperature**2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "beta", "entropy"), [(1.0, 0.5, 0.0), (2.0, 0.3, 0.25)])
def test_losses_and_gradients_are_those_of_dense_logits(
    kind: str, temperature: float, beta: float, entropy: float
) -> None:
    rng = torch.Generator().manual_seed(0)
    tokens, width, other, vocabulary = 150, 16, 24, 300
    hidden, theirs = (torch.randn(tokens, n, generator=rng) for n in (width, other))
    weight, teacher = (torch.randn(vocabulary, n, generator=rng) * 0.3 for n in (width, other))
    labels = torch.randint(vocabulary, (tokens,), generator=rng)
    labels[::7] = IGNORE_INDEX
    hidden.requires_grad_()
    weight.requires_grad_()
    objective = registry.get("objective", "distill")
    made = objective(objective.Options("nobody", kind, beta, temperature, entropy))
    made.head.weight, made.head.logits = teacher, Logits()
    batch = {"labels": labels[None], "teacher": theirs[None]}
    given = partial(made.token_losses, batch=batch)
    loss = token_cross_entropy(hidden, weight, labels, chunk_tokens=70, token_losses=given)
    loss.backward()
    ours = [loss.detach(), hidden.grad, weight.grad]
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits, known = exact[0] @ exact[1].T, labels != IGNORE_INDEX
    losses = dense(kind, logits, theirs.double() @ teacher.double().T, temperature, beta)[known]
    picked = -log_softmax(logits, -1)[known].gather(1, labels[known, None])[:, 0]
    total = ((1 - entropy) * losses + entropy * picked).sum()
    total.backward()
    for found, expected in zip(ours, [total.detach(), exact[0].grad, exact[1].grad], strict=True):
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Workspace:
    """A workspace with a trained teacher, and a project of a smaller student."""
    workspace = Workspace(tmp_path_factory.mktemp("taught"), dataset)
    train(workspace.project, "teacher", "model.n_layer=3", "model.n_embd=48", "run.eval_interval=null")
    objective = {"name": "distill", "teacher": str(workspace.path / "teacher")}
    workspace.config["run"] |= {"objective": objective, "eval_interval": None, "max_iters": 6, "micro_batch_size": 2}
    workspace.config["model"] |= {"dropout": 0.0}
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return workspace


@pytest.fixture(scope="module")
def one(taught: Workspace) -> Followed:
    return follow(taught, "ddp@1")


RUNNERS = ("ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron_tp2@2", "megatron_tp2_sp@2", "megatron_pp2@2")


@pytest.mark.parametrize("runner", mostly_slow(RUNNERS, ["megatron_tp2@2"]))
def test_every_runner_distils_alike(taught: Workspace, one: Followed, runner: str) -> None:
    assert_equal_training(one, follow(taught, runner), TOLERANCE_OF_RUNNERS)
    assert one.column("loss")[-1] < one.column("loss")[0]


def test_a_teacher_with_another_vocabulary_is_refused(taught: Workspace) -> None:
    with pytest.raises(AssertionError, match="it has 320 token IDs and the model has 384"):
        train(taught.project, "refused", "model.vocab_size=384")


def _first_loss(project: str, options: tuple[str, ...]) -> tuple[float, Any]:
    from fixtures_ranks import make_trainer

    trainer = make_trainer(project, options)
    step = next(trainer.batches())
    loss, weights = trainer.runner.compute_loss(step[0].data).item(), trainer.runner.model.lm.state_dict()
    return loss, [{key: value.numpy() for key, value in found.items()} for found in (step[0].data, weights)]


def test_the_loss_is_that_of_two_models_in_transformers(taught: Workspace) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    options = (f"run.output_dir={taught.path / 'once'}",)
    ((loss, (batch, weights)),) = run_ranks(1, _first_loss, str(taught.project), options)
    teacher = AutoModelForCausalLM.from_pretrained(taught.path / "teacher" / "checkpoints" / "step_000020").eval()
    sizes = {key: taught.config["model"][key] for key in ("n_layer", "n_embd", "n_head", "n_positions")}
    batch, weights = ({key: torch.from_numpy(value) for key, value in found.items()} for found in (batch, weights))
    student = GPT2LMHeadModel(GPT2Config(vocab_size=weights["lm_head.weight"].shape[0], **sizes)).eval()
    student.load_state_dict(weights)
    with torch.no_grad():
        ours, theirs = (m(input_ids=batch["input_ids"]).logits[..., :320].double() for m in (student, teacher))
    known = batch["labels"] != IGNORE_INDEX
    expected = dense("forward", ours[known], theirs[known], 1.0, 0.5).sum().item()
    assert loss == pytest.approx(expected, rel=1e-5)  # fp32 against fp64


def test_on_policy_the_student_learns_on_what_it_samples() -> None:
    kind = registry.get("objective", "on_policy_distill")
    made = kind(kind.Options("nobody", completions=2, max_new_tokens=3))
    assert made.options.divergence == "reverse"
    assert made.row_layout == "prompts"
    made.model = SimpleNamespace(num_targets=Model.num_targets)
    assert made.units({"labels": torch.tensor([[1, IGNORE_INDEX, 2]])}) == 2
