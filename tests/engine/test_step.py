"""What one optimizer step computes: gradient checkpointing, precision, clipping, accumulation, the loss's divisor."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model
from crosstrain.engine.runner import Runner
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.training.bad_steps import BadSteps
from crosstrain.training.state import State
from crosstrain.utils.errors import TrainingError
from crosstrain.utils.types import MicroBatch, Step
from fixtures_ranks import mostly_slow


def make_runner(*options: str) -> Runner:
    config = load_config(
        "projects/quickstart.yaml",
        [
            "model.n_layer=2",
            "model.n_embd=64",
            "model.n_head=2",
            "model.vocab_size=300",
            "model.dropout=0.1",
            "run.amp=fp32",
            "run.device=cpu",
            "run.weight_decay=0.0",
            *options,
        ],
    )
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, None, for_training=True)
    return runner


def batch(first_sample: int, rows: int = 4, length: int = 64, ignored: int = 0) -> MicroBatch:
    g = torch.Generator().manual_seed(first_sample)
    tokens = torch.randint(0, 300, (rows, length + 1), generator=g)
    labels = tokens[:, 1:].clone()
    labels[:, :ignored] = -100
    data = {"input_ids": tokens[:, :-1], "labels": labels}
    return MicroBatch(first_sample, data, int((labels != -100).sum()))


def gradients(runner: Runner, *micro_batches: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    runner.model.zero_grad(set_to_none=True)
    loss = runner.forward_backward(list(micro_batches), sum(m.num_targets for m in micro_batches))
    return loss, {name: p.grad.clone() for name, p in runner.model.weights.parameters().items()}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, gradient in a.items():
        distance = (gradient - b[name]).norm() / gradient.norm().clamp(min=1e-12)
        assert distance <= tolerance, f"{name}: {distance:.1e}"


@pytest.mark.parametrize("amp", mostly_slow(["fp32", "bf16"], ["bf16"]))
@pytest.mark.parametrize("mode", mostly_slow(["full", "selective", "offload"], ["selective"]))
def test_gradient_checkpointing_changes_nothing(mode: str, amp: str) -> None:
    plain = make_runner(f"run.amp={amp}")
    saving = make_runner(f"run.amp={amp}", f"run.gradient_checkpointing={mode}")
    assert plain.model.weights.parameters().keys() == saving.model.weights.parameters().keys()
    expected_loss, expected = gradients(plain, batch(0))
    loss, found = gradients(saving, batch(0))
    assert loss == expected_loss
    # The second forward runs the same kernels with the same dropout, so nothing but the order of sums may differ.
    assert_close(expected, found, 1e-6)


def peak_of_saved_tensors(step: Callable[[], object]) -> int:
    """Bytes of distinct storages that autograd keeps for the backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(kept.values())


def test_gradient_checkpointing_keeps_less() -> None:
    kept = {}
    for mode in ("none", "selective", "full"):
        runner = make_runner(f"run.gradient_checkpointing={mode}")
        kept[mode] = peak_of_saved_tensors(lambda runner=runner: runner.compute_loss(batch(0).data))
    assert kept["full"] < kept["none"] * 0.6
    assert kept["full"] <= kept["selective"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blocks", "model"])
def test_compilation_changes_neither_names_nor_results(mode: str) -> None:
    plain, compiled = make_runner("model.dropout=0.0"), make_runner("model.dropout=0.0", f"run.compile={mode}")
    assert plain.model.weights.parameters().keys() == compiled.model.weights.parameters().keys()
    (expected_loss, expected), (loss, found) = gradients(plain, batch(0)), gradients(compiled, batch(0))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(expected, found, 1e-5)  # fused kernels round differently


def test_the_loss_divides_by_the_target_tokens_of_the_whole_step() -> None:
    runner = make_runner("model.dropout=0.0")
    few, many = batch(0, ignored=60), batch(4)
    together = MicroBatch(
        0, {k: torch.cat([few.data[k], many.data[k]]) for k in few.data}, few.num_targets + many.num_targets
    )
    expected_loss, expected = gradients(runner, together)
    loss, found = gradients(runner, few, many)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(expected, found, 1e-5)  # fp32 sums in another order


def test_dropout_depends_on_the_sample_number_alone() -> None:
    runner = make_runner()
    first, _ = gradients(runner, batch(8))
    torch.manual_seed(12345)
    again, _ = gradients(runner, batch(8))
    other, _ = gradients(runner, MicroBatch(12, batch(8).data, batch(8).num_targets))
    assert first == again
    assert first != other


def test_clipping_limits_the_step_and_reports_the_norm_before_it() -> None:
    options = ("run.optimizer=sgd", "run.init_lr=1.0", "model.dropout=0.0")
    clipped, free = make_runner(*options, "run.grad_norm_clip=0.01"), make_runner(*options, "run.grad_norm_clip=null")
    moved = {}
    for name, runner in {"clipped": clipped, "free": free}.items():
        before = [p.detach().clone() for p in runner.model.parameters()]
        runner.set_learning_rate(1.0)
        gradients(runner, batch(0))
        result = runner.optimizer_step()
        assert result.applied
        change = [p.detach() - b for p, b in zip(runner.model.parameters(), before, strict=True)]
        moved[name] = torch.cat([c.flatten() for c in change]).norm().item(), result.grad_norm
    assert moved["free"][0] == pytest.approx(moved["free"][1], rel=1e-4)
    assert moved["clipped"][0] == pytest.approx(0.01, rel=1e-3)
    assert moved["clipped"][1] == pytest.approx(moved["free"][1], rel=1e-6)


def test_a_loss_scale_leaves_gradients_as_they_are_and_an_overflow_changes_nothing() -> None:
    options = ("run.optimizer=sgd", "model.dropout=0.0")
    plain = make_runner(*options)
    scaled = make_runner(*options, "run.amp={dtype: fp32, loss_scale: 65536.0}")
    _, expected = gradients(plain, batch(0))
    _, found = gradients(scaled, batch(0))
    assert_close(expected, {k: v / 65536 for k, v in found.items()}, 1e-6)

    before = {k: v.detach().clone() for k, v in scaled.model.weights.parameters().items()}
    scaled.set_learning_rate(1.0)
    next(iter(scaled.model.parameters())).grad[0, 0] = torch.inf
    result = scaled.optimizer_step()
    assert not result.applied
    assert all(torch.equal(v, before[k]) for k, v in scaled.model.weights.parameters().items())
    assert all(p.grad is None for p in scaled.model.parameters())


def record(runner: Runner, state: State, *applied: bool) -> None:
    """Steps with finite losses, some of whose gradients were not finite."""
    batch = Step()
    batch.numbers = list(range(32, 40))
    for step in applied:
        state.step += 1
        hook = BadSteps(None, SimpleNamespace(runner=runner, dataset=None, run=runner.run, state=state, is_main=False))
        assert hook.after_backward(batch, 1.0) is None
        norm = 1.0 if step else None
        hook.after_step(StepMetrics(state.step, 1.0, 1e-4, norm, 1.0, 40, skipped_steps=0, applied=step))


def test_endless_overflow_ends_with_a_diagnosis() -> None:
    runner, state = make_runner("run.amp={dtype: fp16, max_skipped: 3}"), State()
    record(runner, state, False, True, False, False)
    with pytest.raises(TrainingError, match=r"step 5 \(samples 32 to 39\): 3 steps in a row overflowed"):
        record(runner, state, False)


def test_gradients_that_are_not_finite_stop_a_run_without_loss_scaling() -> None:
    with pytest.raises(TrainingError, match=r"step 1 \(samples 32 to 39\): the gradients are not finite"):
        record(make_runner("run.amp=bf16"), State(), False)


def test_norms_and_biases_do_not_decay() -> None:
    runner = make_runner("run.weight_decay=0.1")
    decay = {id(p): group["weight_decay"] for group in runner.optimizer.param_groups for p in group["params"]}
    for name, parameter in runner.model.weights.parameters().items():
        exempt = name.endswith(".bias") or ".ln_" in name
        assert decay[id(parameter)] == (0.0 if exempt else 0.1), name
