"""Find the first difference between two recorded trainings, with a hint at its usual cause."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Sums = tuple[float, float, float, float]  # of (g-r)^2, g*g, g*r and r*r, g a tensor here and r the reference's
Record = dict[str, Any]  # of a contestant, by its rank 0; see worker.py

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


def largest(gradients: dict[str, Sums]) -> tuple[float, str]:
    """The largest gradient difference of a step, and its parameter."""
    return max(((gradient_difference(s), name) for name, s in gradients.items()), default=(0.0, ""))


def number_difference(record: Record, reference: Record, key: str) -> float:
    """The largest difference of a number over all steps."""
    return max(difference(a[key], b[key]) for a, b in zip(record["rows"], reference["rows"], strict=True))


def diagnose(record: Record, reference: Record, tolerance: Tolerance) -> str | None:
    """None if the two trained alike; otherwise one sentence: the first thing that differs, and a hint."""
    checks = (_before, _first_step, _later_steps, _state)
    return next((found for check in checks for found in check(record, reference, tolerance)), None)


def _before(record: Record, reference: Record, tolerance: Tolerance) -> Iterator[str]:
    """Differences in samples and in the loss before the first step, and in the loss of that step."""
    for mine, theirs in zip(record["rows"], reference["rows"], strict=True):
        if mine["samples"] != theirs["samples"]:
            yield f"step {mine['step']} ended at sample {mine['samples']} instead of {theirs['samples']}"
    pairs = zip(record["first_samples"], reference["first_samples"], strict=True)
    for step, (here, there) in enumerate(pairs, 1):
        if here != there:
            yield (
                f"the micro batches of step {step} begin with samples {_numbers(here)} instead of {_numbers(there)}: "
                f"ranks of `dp` must have numbers of their own, and all others those of their `dp` rank"
            )
    loss, expected = record["plain_loss"], reference["plain_loss"]
    if difference(loss, expected) > tolerance.numbers:
        yield (
            f"before the first step, in evaluation mode, the loss is {loss:.7g} instead of {expected:.7g}: the weights "
            f"or the forward differ; look at construct, shards and loaded"
        )
    loss, expected = record["rows"][0]["loss"], reference["rows"][0]["loss"]
    if difference(loss, expected) > tolerance.numbers:
        if _wrong_gradients(record, reference, tolerance):
            yield (
                f"the loss of step 1 is {loss} instead of {expected}, although in evaluation mode the losses agree: "
                f"random numbers (dropout) differ; a runner must not seed them, by rank for example"
            )
        else:
            yield (
                f"the loss of step 1 is said to be {loss} instead of {expected}, although its gradients agree: look at "
                f"what forward_backward returns"
            )


def _wrong_gradients(record: Record, reference: Record, tolerance: Tolerance) -> list[str]:
    """Parameters whose gradient in step 1 is not the reference's, in the model's order."""
    sums, floor = record["gradients"][0], _floor(reference["gradients"][0])
    return [
        name
        for name in record["names"]
        if name in sums
        and gradient_difference(sums[name]) > tolerance.gradients
        and not sums[name][0] <= (tolerance.gradients * math.sqrt(sums[name][3]) + floor) ** 2
    ]


def _floor(gradients: dict[str, Sums]) -> float:
    """Norm below which a tensor's gradient in a step is rounding alone."""
    return _SMALL * math.sqrt(sum(s[3] for s in gradients.values() if math.isfinite(s[3])))


def _first_step(record: Record, reference: Record, tolerance: Tolerance) -> Iterator[str]:
    """Differences in the gradients of step 1."""
    if apart := _apart(record, record["spread"], tolerance.gradients):
        yield (
            f"in step 1 the ranks hold different gradients of {_list(apart)}: a missing all-reduce, so each rank "
            f"trains a model of its own"
        )
    sums = record["gradients"][0]
    if lacking := sorted(reference["gradients"][0].keys() - sums.keys()):
        yield f"in step 1 there is no gradient of {_list(lacking)}"
    wrong = _wrong_gradients(record, reference, tolerance)
    if not wrong:
        return
    ratios = {name: sums[name][2] / sums[name][3] if sums[name][3] else math.inf for name in wrong}
    most = 10 * tolerance.gradients
    straight = {n for n, r in ratios.items() if r != math.inf and _residual(sums[n], r) <= most * abs(r)}
    ratio = ratios[wrong[0]]
    if len(straight) == len(sums) and max(ratios.values()) - min(ratios.values()) <= 1e-3 * abs(ratio):
        yield f"in step 1 every gradient is {ratio:.4g} times the reference's: {_scale_hint(ratio, record)}"
    if straight.issuperset(wrong) and {*wrong} <= {*record["tied"]}:
        yield (
            f"in step 1 the gradient of {_list(wrong)}, a tied weight, is {ratio:.4g} times the reference's and all "
            f"others agree: it is counted once for each of its uses"
        )
    size, worst = largest({name: sums[name] for name in wrong})
    yield (
        f"in step 1 the gradient of {wrong[0]} differs first (by {gradient_difference(sums[wrong[0]]):.1e} of its "
        f"norm), {len(wrong)} of {len(sums)} do, most that of {worst} (by {size:.1e}): the backward of that module"
    )


def _scale_hint(ratio: float, record: Record) -> str:
    dp, accumulation = record["dp_size"], record["accumulation"]
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


def _later_steps(record: Record, reference: Record, tolerance: Tolerance) -> Iterator[str]:
    """Differences in learning rates, in the weights of the ranks, and in the numbers of the steps."""
    for step, (rate, expected) in enumerate(zip(record["rates"], reference["rates"], strict=True), 1):
        if difference(rate, expected) > 1e-9:
            yield (
                f"step {step} is made with the learning rate {rate:.6g} instead of {expected:.6g}: the schedule must "
                f"advance once for each applied step, not for each micro batch ({record['accumulation']} here) or "
                f"rank"
            )
    if apart := _apart(record, record["state"]["weight_spread"], _EPSILON):
        yield (
            f"after the last step the ranks hold different weights of {_list(apart)}: an update that does not reach "
            f"the other ranks"
        )
    for mine, theirs in zip(record["rows"], reference["rows"], strict=True):
        for key, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
            if difference(mine[key], theirs[key]) > tolerance.numbers:
                hint = " over equal gradients" if mine["step"] == 1 else (
                    ", after gradients in step 1 and learning rates that agree: look at clipping, the optimizer and "
                    "what reaches the other ranks"
                )  # fmt: skip
                yield f"the {what} of step {mine['step']} is {mine[key]} instead of {theirs[key]}{hint}"


def _state(record: Record, reference: Record, tolerance: Tolerance) -> Iterator[str]:
    """Differences in the state that a checkpoint after the last step would hold."""
    state, steps = record["state"], reference["gradients"]
    floors = [_floor(gradients) for gradients in steps]
    # What rounding alone moves, such as the bias of attention's keys, goes another way each time. What has no gradient
    # at all does not.
    norms = {name: [math.sqrt(g[name][3]) if name in g else 0.0 for g in steps] for name in steps[0]}
    still = {n for n, found in norms.items() if any(found) and all(map(operator.le, found, floors))}
    if state["missing"] or state["surplus"]:
        what = f"lacks {_list(state['missing'])}" if state["missing"] else f"has {_list(state['surplus'])} besides"
        yield f"the state after the last step, and so every checkpoint, {what}: look at shards and held_state"
    for kind, sums in state["moments"].items():
        limit, excused = (0.0, set()) if kind == "step" else (tolerance.state, still)
        if wrong := [name for name, s in sums.items() if gradient_difference(s) > limit and name not in excused]:
            yield (
                f"after the last step the optimizer's {kind} of {_list(wrong)} differs, though losses and gradients "
                f"agree: look at held_state, pieces and the optimizer's groups"
            )
    for name, sums in state["weights"].items():
        way = math.sqrt(reference["state"]["travelled"][name][0])
        if name not in still and math.sqrt(sums[0]) > tolerance.state * way + _EPSILON * math.sqrt(sums[3]):
            yield (
                f"after the last step {name} is {math.sqrt(sums[0]) / max(way, 1e-30):.1e} of the way that it went "
                f"away from the reference's: look at the optimizer's groups (decay) and what an update leaves out"
            )


def _apart(record: Record, spread: dict[str, float], most: float) -> list[str]:
    """Parameters whose copies on the ranks differ by more than `most`, in the model's order."""
    return [name for name in record["names"] if spread.get(name, 0.0) > most]


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"
