"""Find the first difference between two recorded trainings, with a hint at its usual cause."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Sums = tuple[float, float, float, float]  # of (g-r)^2, g*g, g*r and r*r, g a tensor here and r the reference's

_LOUD = 1e-3  # relative; a reference with more noise than a quarter of it proves nothing about others
_SMALL = 1e-7  # of all gradients' norm: below it a tensor's gradient is rounding alone
_EPSILON = 2.0**-22  # relative rounding of fp32 weights in a few steps


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that are rounding.

    `numbers` for losses and gradient norms of every step, `gradients` for each tensor in the first step, relative to
    its norm. A floor for each precision, and four times the noise that the reference itself shows with its micro
    batches in reverse order, where that is more, but not above `_LOUD`: docs/compare.md has measurements. `state` is
    for weights after the last step, relative to the way that they have gone, and for moments, relative to their norm.
    """

    numbers: float
    gradients: float
    state: float

    @staticmethod
    def of(dtype: str, noise: float = 0.0) -> Tolerance:
        if dtype == "fp32":
            return Tolerance(max(2e-6, min(4 * noise, _LOUD)), 1e-5, 0.02)
        return Tolerance(max(5e-4, min(4 * noise, 10 * _LOUD)), 1e-2, 0.2)


@dataclass
class Record:
    """The record that a contestant's rank 0 wrote; see worker.py."""

    name: str
    data: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data["rows"]

    def sums(self, number: int) -> dict[str, Sums]:
        """Sums by parameter of the `number`-th compared step, from 1."""
        return {name: tuple(sums) for name, sums in self.data["gradients"][number - 1].items()}


def difference(a: float | None, b: float | None) -> float:
    """Relative to `b`; None, a number that is not finite, equals only itself."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b) / max(abs(b), 1e-30)


def gradient_difference(sums: Sums) -> float:
    """|g - r| / |r|."""
    dd, gg, _, rr = sums
    if not math.isfinite(gg) and not math.isfinite(rr):  # an overflow on both sides
        return 0.0
    if rr == 0.0 or not math.isfinite(dd):
        return 0.0 if gg == rr else math.inf
    return math.sqrt(dd / rr)


def largest(record: Record, number: int) -> tuple[float, str]:
    """The largest gradient difference of the `number`-th step, and its parameter."""
    return max(((gradient_difference(s), name) for name, s in record.sums(number).items()), default=(0.0, ""))


def number_difference(record: Record, reference: Record, key: str) -> float:
    """The largest difference of a number over all steps."""
    return max(difference(a[key], b[key]) for a, b in zip(record.rows, reference.rows, strict=True))


def diagnose(record: Record, reference: Record, tolerance: Tolerance) -> str | None:
    """None if the two trained alike; otherwise one sentence: the first thing that differs, and a hint."""
    checks = (_samples, _forward, _first_loss, _replicas, _gradients, _rates, _copies, _steps, _state)
    return next((found for check in checks if (found := check(record, reference, tolerance))), None)


def _samples(record: Record, reference: Record, _: Tolerance) -> str | None:
    for mine, theirs in zip(record.rows, reference.rows, strict=True):
        if mine["samples"] != theirs["samples"]:
            return f"step {mine['step']} ended at sample {mine['samples']} instead of {theirs['samples']}"
    pairs = zip(record.data["first_samples"], reference.data["first_samples"], strict=True)
    for step, (here, there) in enumerate(pairs, 1):
        if here != there:
            return (
                f"the micro batches of step {step} begin with samples {_numbers(here)} instead of {_numbers(there)}: "
                f"ranks of `dp` must have numbers of their own, and all others those of their `dp` rank"
            )
    return None


def _forward(record: Record, reference: Record, tolerance: Tolerance) -> str | None:
    mine, theirs = record.data["plain_loss"], reference.data["plain_loss"]
    if difference(mine, theirs) <= tolerance.numbers:
        return None
    return (
        f"before the first step, in evaluation mode, the loss is {mine:.7g} instead of {theirs:.7g}: the weights or "
        f"the forward differ; look at construct, shards and loaded"
    )


def _first_loss(record: Record, reference: Record, tolerance: Tolerance) -> str | None:
    mine, theirs = record.rows[0]["loss"], reference.rows[0]["loss"]
    if difference(mine, theirs) <= tolerance.numbers:
        return None
    if not _wrong_gradients(record, reference, tolerance):
        return (
            f"the loss of step 1 is said to be {mine} instead of {theirs}, although its gradients agree: look at what "
            f"forward_backward returns"
        )
    return (
        f"the loss of step 1 is {mine} instead of {theirs}, although in evaluation mode the losses agree: random "
        f"numbers (dropout) differ; a runner must not seed them, by rank for example"
    )


def _replicas(record: Record, _: Record, tolerance: Tolerance) -> str | None:
    apart = [name for name in record.data["names"] if record.data["spread"].get(name, 0.0) > tolerance.gradients]
    if not apart:
        return None
    return (
        f"in step 1 the ranks hold different gradients of {_list(apart)}: a missing all-reduce, so each rank trains a "
        f"model of its own"
    )


def _wrong_gradients(record: Record, reference: Record, tolerance: Tolerance) -> list[str]:
    """Parameters whose gradient in step 1 is not the reference's, in the model's order."""
    sums = record.sums(1)
    floor = _SMALL * math.sqrt(sum(s[3] for s in reference.sums(1).values() if math.isfinite(s[3])))
    return [
        name
        for name in record.data["names"]
        if name in sums
        and gradient_difference(sums[name]) > tolerance.gradients
        and not sums[name][0] <= (tolerance.gradients * math.sqrt(sums[name][3]) + floor) ** 2
    ]


def _gradients(record: Record, reference: Record, tolerance: Tolerance) -> str | None:
    sums = record.sums(1)
    lacking = sorted(reference.sums(1).keys() - sums.keys())
    if lacking:
        return f"in step 1 there is no gradient of {_list(lacking)}"
    wrong = _wrong_gradients(record, reference, tolerance)
    if not wrong:
        return None
    ratios = {name: sums[name][2] / sums[name][3] if sums[name][3] else math.inf for name in wrong}
    straight = {n for n, ratio in ratios.items() if _residual(sums[n], ratio) <= 10 * tolerance.gradients * abs(ratio)}
    common = len(straight) == len(wrong) and max(ratios.values()) - min(ratios.values()) <= 1e-3 * abs(ratios[wrong[0]])
    if common and len(wrong) == len(sums):
        return (
            f"in step 1 every gradient is {ratios[wrong[0]]:.4g} times the reference's: {_scale_hint(ratios, record)}"
        )
    tied = [name for name in wrong if name in straight and name in record.data["tied"]]
    if tied and len(tied) == len(wrong):
        return (
            f"in step 1 the gradient of {_list(tied)}, a tied weight, is {ratios[tied[0]]:.4g} times the reference's "
            f"and all others agree: it is counted once for each of its uses"
        )
    size, worst = max((gradient_difference(sums[name]), name) for name in wrong)
    return (
        f"in step 1 the gradient of {wrong[0]} differs first (by {gradient_difference(sums[wrong[0]]):.1e} of its "
        f"norm), {len(wrong)} of {len(sums)} do, most that of {worst} (by {size:.1e}): the backward of that module"
    )


def _scale_hint(ratios: dict[str, float], record: Record) -> str:
    ratio = next(iter(ratios.values()))
    dp, accumulation = record.data["dp_size"], record.data["accumulation"]
    if dp > 1 and math.isclose(ratio, dp, rel_tol=1e-3):
        return f"they were summed over the {dp} data-parallel ranks instead of averaged"
    if dp > 1 and math.isclose(ratio, 1 / dp, rel_tol=1e-3):
        return f"they were divided by the {dp} data-parallel ranks once more than summed"
    if accumulation > 1 and math.isclose(ratio, 1 / accumulation, rel_tol=1e-3):
        return f"the engine divides by the {accumulation} accumulated micro batches once more"
    return "the loss is scaled differently"


def _residual(sums: Sums, ratio: float) -> float:
    """|g - ratio r| / |r|."""
    _, gg, gr, rr = sums
    return math.sqrt(max(gg - 2 * ratio * gr + ratio * ratio * rr, 0.0) / rr)


def _rates(record: Record, reference: Record, _: Tolerance) -> str | None:
    for step, (mine, theirs) in enumerate(zip(record.data["rates"], reference.data["rates"], strict=True), 1):
        if difference(mine, theirs) > 1e-9:
            return (
                f"step {step} is made with the learning rate {mine:.6g} instead of {theirs:.6g}: the schedule must "
                f"advance once for each applied step, not for each micro batch "
                f"({record.data['accumulation']} here) or rank"
            )
    return None


def _steps(record: Record, reference: Record, tolerance: Tolerance) -> str | None:
    for mine, theirs in zip(record.rows, reference.rows, strict=True):
        for key in ("loss", "grad_norm"):
            if difference(mine[key], theirs[key]) > tolerance.numbers:
                step, what = mine["step"], key.replace("grad_norm", "gradient norm")
                if step == 1:
                    return f"the {what} of step 1 is {mine[key]} instead of {theirs[key]} over equal gradients"
                return (
                    f"the {what} of step {step} is {mine[key]} instead of {theirs[key]}, after gradients in step 1 and "
                    f"learning rates that agree: look at clipping, the optimizer and what reaches the other ranks"
                )
    return None


def _copies(record: Record, _: Record, tolerance: Tolerance) -> str | None:
    spread = record.data["state"]["weight_spread"]
    apart = [name for name in record.data["names"] if spread.get(name, 0.0) > _EPSILON]
    if not apart:
        return None
    return (
        f"after the last step the ranks hold different weights of {_list(apart)}: an update that does not reach the "
        f"other ranks"
    )


def _state(record: Record, reference: Record, tolerance: Tolerance) -> str | None:
    """Compare the state that a checkpoint after the last step would hold."""
    state = record.data["state"]
    if state["missing"] or state["surplus"]:
        what = f"lacks {_list(state['missing'])}" if state["missing"] else f"has {_list(state['surplus'])} besides"
        return f"the state after the last step, and so every checkpoint, {what}: look at shards and held_state"
    for kind, sums in state["moments"].items():
        limit = 0.0 if kind == "step" else tolerance.state
        wrong = [name for name, s in sums.items() if gradient_difference(s) > limit]
        if wrong:
            return (
                f"after the last step the optimizer's {kind} of {_list(wrong)} differs, though losses and gradients "
                f"agree: look at held_state, pieces and the optimizer's groups"
            )
    for name, sums in state["weights"].items():
        way = math.sqrt(reference.data["state"]["travelled"][name][0])
        if math.sqrt(sums[0]) > tolerance.state * way + _EPSILON * math.sqrt(sums[3]):
            return (
                f"after the last step {name} is {math.sqrt(sums[0]) / max(way, 1e-30):.1e} of the way that it went "
                f"away from the reference's: look at the optimizer's groups (decay) and what an update leaves out"
            )
    return None


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"
