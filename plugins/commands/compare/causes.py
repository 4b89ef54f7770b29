"""Common causes of differences between two recorded runs."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from .tolerance import Gap, Record, difference

_ROUNDINGS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # largest relative rounding error


def multiple(gaps: list[Gap]) -> float | None:
    """Return the common factor if every tensor is the same multiple of the reference's, else None."""
    ratios = [gap.ratio for gap in gaps if gap.residual <= 0.1 * abs(gap.ratio - 1)]
    alike = len(ratios) == len(gaps) > 0 and max(ratios) - min(ratios) <= 1e-3 * max(abs(ratios[0]), 1e-9)
    return ratios[0] if alike and math.isfinite(ratios[0]) else None


def rounding(gaps: Iterable[Gap]) -> str | None:
    """Return the dtype to which the tensors were rounded, if nearly all differences look like its rounding error."""
    return precision([g.relative if g.dr**2 <= 0.25 * g.dd * g.rr else math.inf for g in gaps])


def precision(errors: list[float], fewest: int = 1) -> str | None:
    """Return the dtype with a rounding error that explains 80% and at least `fewest` of the errors, else None."""
    # Rounding to p bits has an error of up to 2^-p, and a root mean square error of 0.3 to 0.6 times that.
    for name, epsilon in _ROUNDINGS.items():
        if sum(0.2 * epsilon < error < 0.8 * epsilon for error in errors) >= max(0.8 * len(errors), fewest):
            return name
    return None


# ---- weights of micro batches


def weighting(record: Record, micro_batches: list[list[int]], weights: np.ndarray) -> str:
    """Describe the mistake that gives the micro batches these weights; 1 is correct.

    `micro_batches`: [first sample, number of targets] of each micro batch.
    """
    samples, targets = (np.array(column) for column in zip(*micro_batches, strict=True))
    number, total, dp = np.arange(len(samples)), targets.sum(), record["dp_size"]
    rank, place = number % dp, number // dp
    own: Any = np.array([targets[rank == r].sum() for r in rank])
    out = {
        "it is averaged over micro batches, not over targets": total / (len(samples) * targets),
        "it is averaged over ranks, not over targets": total / (dp * own),
        "it is summed over ranks that divide by their own targets": total / own,
    }
    out |= {f"it has the micro batches of rank {r} alone, as if all": (rank == r) * total / own for r in range(dp)}
    parts = {f"the micro batches of rank {r}": rank == r for r in range(dp)}
    parts |= {f"the {name} micro batch of each rank": place == place[i] for name, i in (("first", 0), ("last", -1))}
    parts |= {f"the micro batch that begins with sample {sample}": samples == sample for sample in samples}
    for name, part in parts.items():
        out |= {f"it lacks {name}": 1.0 - part, f"it has {name} alone": 1.0 * part}
        out[f"it counts {name} twice"] = 1.0 + part
    for cause, candidate in out.items():
        if abs(candidate - 1).max() > 1e-3 and abs(candidate - weights).max() < 1e-2:
            return cause
    return f"its micro batches are weighted by {', '.join(f'{w:.3g}' for w in weights)} instead of 1"


def solve(columns: list[dict[str, float]], gradients: dict[str, float], sizes: dict[str, float]) -> Any:
    """Fit `gradients` as a weighted sum of `columns`, and return the weights and the relative residual.

    All dicts have parameter names as keys. The values are projections of gradients; in `sizes`, norms of gradients.
    A fit needs at least two more parameters than columns; otherwise return (None, inf).
    """
    names = [name for name, size in sizes.items() if size and all(name in column for column in columns)]
    if len(names) < len(columns) + 2:
        return None, math.inf
    scale = np.array([sizes[name] for name in names])
    matrix = np.array([[column[name] for column in columns] for name in names]) / scale[:, None]
    mine = np.array([gradients[name] for name in names]) / scale
    weights, *_ = np.linalg.lstsq(matrix, mine, rcond=None)
    return weights, float(np.linalg.norm(matrix @ weights - mine)) / max(float(np.linalg.norm(mine)), 1e-30)


def usual_scale(ratio: float, record: Record) -> str | None:
    """Return the common mistake that multiplies a loss or gradient by `ratio`; None if there is none."""
    dp, sharing, accumulation = record["dp_size"], record["context_size"], record["accumulation"]
    hints = {
        1 / sharing: f"averaged over the {sharing} context-parallel ranks, of which each has a part of the sum",
        float(sharing): f"counted by each of the {sharing} context-parallel ranks",
        1 / accumulation: f"divided by the {accumulation} accumulated micro batches once more",
        float(accumulation): f"not divided by the {accumulation} accumulated micro batches",
        1 / dp: f"divided by the {dp} data-parallel ranks once more than summed",
        float(dp): f"summed over the {dp} data-parallel ranks instead of averaged",
    }
    alike = (hint for factor, hint in hints.items() if factor != 1 and math.isclose(ratio, factor, rel_tol=1e-3))
    return next(alike, None)


def scaled(ratio: float, names: Iterable[str] | None, record: Record) -> str:
    """Explain why the gradients of the parameters `names` (None: all) are `ratio` times the reference's."""
    usual = usual_scale(ratio, record)
    if abs(ratio) < 1e-3:
        return "left out of the backward, or set to zero"
    if names is None:
        other = "the loss or its gradients are scaled differently; look at the loss scale and gradient_scale"
        return f"they are {usual}" if usual else other
    also = f", or it is {usual}" if usual else ""
    if {*names} <= {*record["tied"]}:
        uses = "which is counted once for each of its uses" if ratio > 1 else "of whose uses some are left out"
        return f"a tied weight, {uses}{also}"
    for times, said in ((ratio, "added once for each of {:.0f}"), (1 / ratio, "divided once too often by {:.0f}")):
        if times > 1.5 and abs(times - round(times)) < 1e-3:
            return f"it is {said.format(times)} ranks or uses{also}"
    return "it is scaled by itself"


# ---- norms, learning rates and optimizer state


def norm_cause(ratio: float, record: Record, most: float) -> str:
    """Explain a gradient norm that is `ratio` times the reference's; `most`: largest relative rounding error."""
    for k in sorted({record["dp_size"], record["world_size"], record["world_size"] // record["dp_size"]} - {1}):
        if difference(ratio**2, k) <= 4 * most:
            return f"its square is summed over {k} ranks that hold the same, so that each part is counted {k} times"
    return (
        "gradient_norm counts parts twice, such as a tied weight or copies, or leaves parts out, or gradients change "
        "before it, as by clipping or by the loss scale"
    )


def rate_cause(rates: list[float]) -> str:
    """Explain the wrong learning rates `rates` of a step."""
    if len(rates) > 1:
        return "the schedule does not reach all parameter groups, or some have a learning rate of their own"
    return (
        "the schedule must advance once for each applied step, not with each micro batch or each rank (process), must "
        "go on after a resume, and nothing else may change the rate"
    )


def moment_cause(kind: str, gaps: list[Gap]) -> str:
    """Explain optimizer state that is wrong although the gradients are equal."""
    if kind == "step":
        return "the optimizer's count of steps, and with it its bias correction"
    if rounded := precision([gap.relative for gap in gaps], 3):
        return f"moments are kept in {rounded}"
    if (ratio := multiple(gaps)) is not None:
        return f"it is {ratio:.4g} times the reference's: clipping, unscaling or their order, or the optimizer's betas"
    if all(multiple([gap]) for gap in gaps):
        return "gradients are clipped or scaled by factors of their own, by group or by tensor"
    return "held.state, held.pieces, or the optimizer's settings"
