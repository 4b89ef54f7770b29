"""Common causes of differences between two recorded runs."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from .tolerance import Gap, Record, difference, relative

_ROUNDINGS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # largest relative rounding error


def multiple(gaps: list[Gap]) -> float | None:
    """Return the common factor if every tensor is the same multiple of the reference's tensor, else None."""
    ratios = [gap.ratio for gap in gaps if gap.residual <= 0.1 * abs(gap.ratio - 1)]
    alike = len(ratios) == len(gaps) > 0 and max(ratios) - min(ratios) <= 1e-3 * max(abs(ratios[0]), 1e-9)
    return ratios[0] if alike and math.isfinite(ratios[0]) else None


def rounded(measured: Record, expected: Record, names: list[str]) -> str | None:
    """Return the type that all wrong tensors `names` are rounded to, and that the reference's are not, else None."""
    found = {measured["rounded"].get(name) for name in names}
    mine = found.pop() if len(found) == 1 else None
    return None if mine in {expected["rounded"].get(name) for name in names} else mine


def size_of_rounding(gaps: Iterable[Gap]) -> str | None:
    """Return the type whose rounding errors have the size and direction of at least 80% of the differences."""
    errors = [gap.relative if gap.dr**2 <= 0.25 * gap.dd * gap.rr else math.inf for gap in gaps]
    # Rounding to p bits causes relative errors of up to 2^-p, with a root mean square of 0.3 to 0.6 times 2^-p.
    for name, epsilon in _ROUNDINGS.items():
        if sum(0.2 * epsilon < error < 0.8 * epsilon for error in errors) >= max(0.8 * len(errors), 1):
            return name
    return None


# ---- weights of micro batches


def weighting(record: Record, micro_batches: list[list[int]], weights: np.ndarray) -> str | None:
    """Describe the mistake that gives the micro batches these weights; the correct weight is 1. None: no mistake.

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
    out |= {
        f"it has only the micro batches of rank {r}, as if there were no others": (rank == r) * total / own
        for r in range(dp)
    }
    if np.ptp(weights) < 1e-2:  # the same weight for all
        factor = float(weights.mean())
        said = usual_scale(factor, record) or f"the sum of the micro batches, {factor:.4g} times"
        return f"it is {said}" if abs(factor - 1) > 1e-2 else None
    parts = {f"the micro batches of rank {r}": rank == r for r in range(dp if dp > 1 else 0)}
    parts |= {f"the {name} micro batch of each rank": place == place[i] for name, i in (("first", 0), ("last", -1))}
    parts |= {f"the micro batch that begins with sample {sample}": samples == sample for sample in samples}
    for name, part in parts.items():
        out |= {f"it lacks {name}": 1.0 - part, f"it has only {name}": 1.0 * part}
        out[f"it counts {name} twice"] = 1.0 + part
    for cause, candidate in out.items():
        if abs(candidate - 1).max() > 1e-3 and abs(candidate - weights).max() < 1e-2:
            return cause
    said = f"its micro batches are weighted by {', '.join(f'{w:.3g}' for w in weights)} instead of 1"
    last = place == place.max()
    if abs(weights[last] - 1).max() < 1e-2 and weights[~last].max() < 1:
        said += "; only each rank's last is right, so sums change between micro batches, as by clipping"
    return said


def router_weight(
    parts: list[dict[str, float]],
    without: list[dict[str, float]],
    gradients: dict[str, float],
    sizes: dict[str, float],
    most: float,
) -> str | None:
    """Explain gradients in which only the routers' losses have a wrong weight.

    parts: projections of each micro batch's gradient; without: the same without the routers' losses. most: largest
    relative residual that counts as rounding error.
    """
    if not without:
        return None
    whole, plain = ({name: sum(part[name] for part in each) for name in each[0]} for each in (parts, without))
    weights, rest = solve([plain, {name: whole[name] - plain[name] for name in whole}], gradients, sizes)
    if rest > most or abs(weights[0] - 1) > 1e-2:
        return None
    return f"the gradients of the routers' losses (balance and z) are weighted by {weights[1]:.4g} instead of 1"


def solve(columns: list[dict[str, float]], gradients: dict[str, float], sizes: dict[str, float]) -> Any:
    """Fit `gradients` as a weighted sum of `columns`, and return the weights and the relative residual.

    All dicts have parameter names as keys. The values are projections of gradients; in `sizes`, they are norms
    of gradients. A fit needs at least two more parameters than columns; with fewer, return (None, inf).
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
    """Describe the common mistake that multiplies a loss or gradient by `ratio`; None: no common mistake does."""
    dp, sharing, accumulation = record["dp_size"], record["context_size"], record["accumulation"]
    hints = {
        1 / sharing: f"averaged over the {sharing} context-parallel ranks, each of which has a part of the sum",
        float(sharing): f"counted by each of the {sharing} context-parallel ranks",
        1 / accumulation: f"divided by the {accumulation} accumulated micro batches once more",
        float(accumulation): f"not divided by the {accumulation} accumulated micro batches",
        1 / dp: f"divided by the {dp} data-parallel ranks once too often",
        float(dp): f"summed over the {dp} data-parallel ranks instead of averaged",
    }
    return next(
        (hint for factor, hint in hints.items() if factor != 1 and math.isclose(ratio, factor, rel_tol=1e-3)), None
    )


def scaled(ratio: float, names: Iterable[str] | None, record: Record) -> str:
    """Explain why the gradients of the parameters `names` (None: all) are `ratio` times as large as expected."""
    usual, power = usual_scale(ratio, record), math.log2(ratio) if ratio > 0 else 0.5
    if abs(power) >= 4 and abs(power - round(power)) < 1e-4:
        return f"multiplied by 2**{power:.0f}, as by a loss scale that is multiplied or divided once too often"
    if abs(ratio) < 1e-3:
        return "left out of the backward, or set to zero"
    if names is None:
        other = "the loss or its gradients are scaled differently; look at the loss scale and gradient_scale"
        return f"they are {usual}" if usual else other
    also = f", or it is {usual}" if usual else ""
    if {*names} <= {*record["tied"]}:
        uses = "which is counted once for each of its uses" if ratio > 1 else "with some of its uses left out"
        return f"a tied weight, {uses}{also}"
    for times, said in ((ratio, "added once for each of {:.0f}"), (1 / ratio, "divided once too often by {:.0f}")):
        if times > 1.5 and abs(times - round(times)) < 1e-3:
            return f"it is {said.format(times)} ranks or uses{also}"
    return "it is scaled separately"


# ---- norms, learning rates and optimizer state


def norm_cause(
    ratio: float, squares: dict[str, float], copies: dict[str, int], record: Record, most: float
) -> tuple[str, list[str]]:
    """Explain a gradient norm that is `ratio` times as large as expected; return the cause and affected parameters.

    squares: parameter -> squared gradient norm. copies: parameter -> number of ranks that hold it. most: largest
    relative difference that counts as rounding error.
    """
    total = sum(squares.values())
    other = (
        "gradient_norm counts parts twice or not on all ranks, or sums many squares in fp32, or gradients change "
        "before it, such as by clipping"
    )
    if not total or not math.isfinite(ratio):
        return other, []
    fewest = min(copies.values(), default=1)
    groups = {
        "the tied weight": [*record["tied"]],
        "parameters that every rank holds in full": [name for name, number in copies.items() if number > fewest],
        "biases": [name for name in squares if name.endswith("bias")],
        **{name: [name] for name in squares},
    }
    for k in sorted({record["dp_size"], record["world_size"], record["world_size"] // record["dp_size"]} - {1}):
        if difference(ratio**2, k) <= 4 * most:
            return f"its square is summed over {k} ranks with the same parts, so each part is counted {k} times", []
    for what, names in groups.items():
        share = sum(squares.get(name, 0.0) for name in names) / total
        for times, said in ((2, f"{what} counted twice, on each rank that has a copy"), (0, f"{what} left out")):
            if 100 * most < share < 0.99 and difference(ratio**2, 1 + (times - 1) * share) <= 4 * most:
                return f"the norm has {said}", names
    power = math.log2(ratio) if ratio > 0 else 0.5
    if abs(power - round(power)) < 1e-4:
        return f"it is {ratio:g} times the reference's: the loss scale, or gradients that change after the backward", []
    return other, []


def rate_cause(rates: list[float], number: int, record: Record, reference: Record) -> str:
    """Explain the wrong learning rates `rates` of step `number`; skipped steps are not counted in `number`."""
    if len(rates) > 1:
        return "the schedule does not reach all parameter groups, or some have their own learning rate"
    schedule, ranks, accumulation = reference["schedule"], record["world_size"], record["accumulation"]
    for step, said in (
        (number * accumulation, f"the schedule advances with each micro batch ({accumulation} here), not each step"),
        (number * ranks, f"the schedule advances with each of {ranks} ranks (processes), not each step"),
        (1, "the schedule restarts"),
        *((step, "the schedule must advance once for each applied step") for step in range(1, len(schedule))),
    ):
        if step != number and 0 < step <= len(schedule) and difference(rates[0], schedule[step - 1]) <= 1e-6:
            return f"it is the rate of step {step}: {said}"
    return "the schedule must advance once for each applied step, and nothing else may change the rate"


def lacks_bias_correction(gaps: list[Gap], number: int, betas: tuple[float, float] | None) -> bool:
    """Return True if updates of step `number` are those of Adam without bias correction, from right moments.

    The factor is that of Kingma and Ba (2015), algorithm 1. Epsilon and weight decay, which do not have it, count most
    where gradients are small, so half of the tensors must have it.
    """
    first, second = (1 - beta**number for beta in betas or (0.0, 0.0))
    factor = first / math.sqrt(second)
    near = sum(math.isclose(gap.ratio, factor, rel_tol=0.01) for gap in gaps)
    return abs(factor - 1) > 0.05 and 2 * near >= len(gaps)


def other_setting(mine: dict[str, list[float]], theirs: dict[str, list[float]]) -> str | None:
    """Return a sentence about the first setting with other values in the optimizer's groups of parameters, or None."""
    for key, right in theirs.items():
        if mine.get(key, right) != right:
            return (
                f"the optimizer's {key} is {' or '.join(map(str, mine[key]))} instead of {' or '.join(map(str, right))}"
            )
    return None


def update_cause(ratio: float, number: int, schedule: list[float]) -> str:
    """Explain an update of step `number` that is `ratio` times as large as expected."""
    rates = dict(enumerate(schedule, 1))
    for other in {number - 1, number + 1} & rates.keys() if rates.get(number) else ():
        if abs(ratio - 1) > 1e-3 and math.isclose(ratio, rates[other] / rates[number], rel_tol=1e-4):
            return f"it uses the learning rate of step {other}"
    return f"its update is {ratio:.4g} times the reference's: clipping, the loss scale or the rate"


def small_gradient(step: Record, name: str) -> str | None:
    """Explain a wrong update by a gradient whose difference is below its limit: the moments differ as much."""
    gradient = relative(step["gradients"]["products"][name])
    moments = [relative(kind["products"][name]) for kind in step["state"].values() if name in kind["products"]]
    if not any(gradient and math.isclose(moment, gradient, rel_tol=0.1) for moment in moments):
        return None
    return (
        f"its gradient differs by {gradient:.1e} of its norm, below the limit, but its moments differ as much: look at "
        f"the forward and the backward, such as positions or numbers that are rounded"
    )


def moment_cause(kind: str, gaps: list[Gap], record: Record, reference: Record, rounded: str | None) -> str:
    """Explain optimizer state that is wrong although the gradients are equal. rounded: the type of its values."""
    if kind == "step":
        return "the optimizer's step count, and with it the bias correction"
    clip, norm = reference["clip"], reference["rows"][0]["grad_norm"]
    factor = min(1.0, clip / norm) if clip and norm else 1.0
    if rounded:
        return f"moments are kept in {rounded}"
    ratio, power = multiple(gaps), 2 if "sq" in kind else 1
    if ratio is None:
        if all(multiple([gap]) for gap in gaps):
            return "gradients are clipped or scaled by separate factors, per group or per tensor"
        return "held.state, held.pieces, or the optimizer's settings"
    ours, theirs = (r["rows"][0]["grad_norm"] or math.inf for r in (record, reference))
    if factor < 1 and difference(ours, theirs) > 1e-9 and math.isclose(ratio, (theirs / ours) ** power, rel_tol=1e-6):
        return f"gradients are clipped by the gradient norm {ours:.7g} instead of {theirs:.7g}"
    for usual, said in ((factor**-power, "gradients are not clipped"), (factor**power, "gradients are clipped twice")):
        if factor < 1 and math.isclose(ratio, usual, rel_tol=0.02):
            return said
    return f"it is {ratio:.7g} times the reference's: clipping, unscaling or their order, or the optimizer's betas"
