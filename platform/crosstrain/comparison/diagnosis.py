"""Find the first difference between two recorded trainings, in the order of events, and its usual cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from crosstrain.comparison.tolerance import Gap, Record, Tolerance, difference, steps_of

Phase = Literal[
    "samples", "forward", "gradients", "norm", "learning rate", "update", "state", "evaluation", "checkpoint", "resume",
]  # fmt: skip

_SMALL = 1e-7  # of all gradients' norm: below it a tensor's gradient is rounding alone
_EPSILON = 2.0**-22  # relative rounding of fp32 weights in a few steps


@dataclass(frozen=True)
class Finding:
    """The first difference between a training and the reference's."""

    phase: Phase
    sentence: str
    parameters: list[str] = field(default_factory=list)  # the one that points to the cause first
    ranks: list[int] = field(default_factory=list)  # that alone are off
    cause: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(record: Record, reference: Record, tolerance: Tolerance, resumed: bool = False) -> Finding | None:
    """Return the first difference in the order of events, or None if the two trained alike."""
    judge = _Judge(record, reference, tolerance, resumed)
    return next(judge.findings(), None)


class _Judge:
    def __init__(self, record: Record, reference: Record, tolerance: Tolerance, resumed: bool) -> None:
        self.record, self.reference, self.tolerance, self.resumed = record, reference, tolerance, resumed
        self.rows = {row["step"]: row for row in reference["rows"]}
        self.steps = steps_of(reference)
        self.order = {name: place for place, name in enumerate(record["names"])}
        self.first = record["rows"][0]["step"]

    def findings(self) -> Iterator[Finding]:
        """All differences, the first one first."""
        if self.resumed:
            yield from self._state(self.record["loaded"], self.first - 1, "resume", exact=True)
        yield from self._evaluation()
        for row, step in zip(self.record["rows"], self.record["steps"], strict=True):
            number = row["step"]
            theirs, expected = self.rows[number], self.steps[number]
            yield from self._samples(row, theirs, step, expected)
            yield from self._loss(row, theirs, step, expected)
            yield from self._idle_ranks(step["held_gradients"])
            yield from self._gradients(number, step, expected)
            if difference(row["grad_norm"], theirs["grad_norm"]) > self.tolerance.numbers:
                yield self._finding(
                    "norm",
                    f"the gradient norm of step {number} is {row['grad_norm']} instead of {theirs['grad_norm']} over "
                    f"equal gradients",
                    "gradient_norm counts parts twice, or not on all ranks",
                )
            yield from self._rates(number, step, expected)
            yield from self._weights(number, step, expected)
            if "state" in step and "state" in expected:
                yield from self._state(step, number, "state")
                yield from self._idle_ranks(step["held"])
        later = self.record.get("later_loss")
        if later is not None and difference(later, self.reference["later_loss"]) > self.tolerance.numbers:
            yield self._finding(
                "evaluation",
                f"after training the loss in evaluation mode is {later:.7g} instead of "
                f"{self.reference['later_loss']:.7g}, over equal weights",
                "`evaluate`, or weights that it does not refresh",
            )
        if "saved" in self.record:
            yield from self._state(self.record["saved"], self.record["rows"][-1]["step"], "checkpoint", exact=True)

    def _finding(
        self, phase: Phase, sentence: str, cause: str, parameters: Iterable[str] = (), ranks: Iterable[int] = ()
    ) -> Finding:
        when = "after a resume, " if self.resumed and phase != "resume" else ""
        who = f" (on rank {', '.join(map(str, ranks))} alone)" if ranks else ""
        return Finding(
            "resume" if self.resumed else phase, f"{when}{sentence}{who}: {cause}", list(parameters), list(ranks), cause
        )

    def _ranks(self, names: list[str], off: dict[str, list[int]]) -> list[int]:
        """Ranks that alone are off in all of these parameters."""
        found = [set(off.get(name, ())) for name in names]
        return sorted(set.intersection(*found)) if found else []

    # ---- before the backward

    def _samples(self, row: Record, theirs: Record, step: Record, expected: Record) -> Iterator[Finding]:
        number = row["step"]
        if [*step["data"]] != [*expected["data"]]:
            here, there = (_numbers([int(n) for n in found["data"]]) for found in (step, expected))
            yield self._finding(
                "samples",
                f"the micro batches of step {number} begin with samples {here} instead of {there}",
                "ranks of `dp` must have numbers of their own, and all others those of their `dp` rank",
            )
        if row["samples"] != theirs["samples"]:
            yield self._finding(
                "samples",
                f"step {number} ended at sample {row['samples']} instead of {theirs['samples']}",
                "`dp` and data_parallel_size, which select and count the samples",
            )
        for sample, fields in step["data"].items():
            if other := sorted(key for key, value in expected["data"][sample].items() if fields.get(key) != value):
                yield self._finding(
                    "samples",
                    f"in step {number} the micro batch that begins with sample {sample} has other {', '.join(other)}",
                    "the data must not depend on the runner, its ranks or its processes",
                )

    def _evaluation(self) -> Iterator[Finding]:
        key = "later_loss" if self.resumed else "plain_loss"
        loss, expected = self.record["plain_loss"], self.reference[key]
        if not self.resumed and difference(loss, expected) > self.tolerance.numbers:
            yield self._finding(
                "forward",
                f"before the first step, in evaluation mode, the loss is {loss:.7g} instead of {expected:.7g}",
                "the weights or the forward differ; look at construct, prepare, shards, loaded and evaluate",
            )

    def _loss(self, row: Record, theirs: Record, step: Record, expected: Record) -> Iterator[Finding]:
        if other := step["other_fields"]:
            yield self._finding(
                "forward",
                f"in step {row['step']} the model is given other {', '.join(other)} than the loader has made",
                "what changes a batch on its way to the model, such as to_device, compute_loss or the engine",
            )
        loss, wanted = row["loss"], theirs["loss"]
        if difference(loss, wanted) <= self.tolerance.numbers:
            return
        number, said = row["step"], f"{loss} instead of {wanted}"
        weighted = self._weighted_loss(loss) if number == self.first else None
        if not self._wrong(number, step, expected) and step["gradients"].keys() == expected["gradients"].keys():
            yield self._finding(
                "forward",
                f"the loss of step {number} is said to be {said}, although its gradients agree",
                weighted or "look at what forward_backward returns",
            )
        elif number > 1:
            yield self._finding(
                "forward",
                f"the loss of step {number} is {said}, over equal weights and samples",
                "a forward that depends on more than weights and samples, such as random numbers, buffers or the mode"
                if weighted is None else weighted,
            )  # fmt: skip
        elif weighted is not None:
            yield self._finding("forward", f"the loss of step 1 is {said}", weighted)
        elif self.random:
            yield self._finding(
                "forward",
                f"the loss of step 1 is {said}, although in evaluation mode the losses agree",
                "random numbers (dropout) differ; a runner must not seed them, by rank for example",
            )
        else:
            yield self._finding(
                "forward",
                f"the loss of step 1 is {said}, although in evaluation mode the losses agree and nothing is random",
                "compute_loss and forward_backward, the mask or the targets that training alone sees",
            )

    @property
    def random(self) -> bool:
        """True if the reference's loss differs between training and evaluation, as by dropout."""
        reference = self.reference
        return difference(reference["rows"][0]["loss"], reference["plain_loss"]) > self.tolerance.numbers

    # ---- weights of micro batches

    def _candidates(self) -> dict[str, np.ndarray]:
        """Weights that mistakes give to the micro batches, where 1 is right, by cause."""
        losses = self.reference.get("losses") or []
        if len(losses) < 2:
            return {}
        targets = np.array([row[1] for row in losses])
        count, total, dp = len(losses), float(targets.sum()), int(self.record["dp_size"])
        rank = np.arange(count) % dp
        own: Any = np.array([targets[rank == r].sum() for r in rank])
        out = {"it is averaged over micro batches, not over target tokens": total / (count * targets)}
        if dp > 1:
            out["it is averaged over ranks, not over target tokens"] = total / (dp * own)
            for r in range(dp):
                out[f"it has the micro batches of rank {r} alone"] = np.where(rank == r, 1.0, 0.0)
                out[f"it has the micro batches of rank {r} alone, as if they were all"] = np.where(
                    rank == r, total / own, 0.0
                )
                out[f"it lacks the micro batches of rank {r}"] = np.where(rank == r, 0.0, 1.0)
        place, most = np.arange(count) // dp, (count - 1) // dp
        if most:
            for name, which in (("first", 0), ("last", most)):
                out[f"it lacks the {name} micro batch of each rank"] = np.where(place == which, 0.0, 1.0)
                out[f"it has the {name} micro batch of each rank alone"] = np.where(place == which, 1.0, 0.0)
        for i, row in enumerate(losses):
            out[f"it lacks the micro batch that begins with sample {row[0]:.0f}"] = np.where(
                np.arange(count) == i, 0.0, 1.0
            )
            out[f"it counts the micro batch that begins with sample {row[0]:.0f} twice"] = np.where(
                np.arange(count) == i, 2.0, 1.0
            )
        out |= {f"it is {hint}": np.full(count, ratio) for ratio, hint in self._scales().items()}
        return {cause: weights for cause, weights in out.items() if abs(weights - 1).max() > 1e-3}

    def _scales(self) -> dict[float, str]:
        """Factors on everything that have a usual cause."""
        dp, accumulation = self.record["dp_size"], self.record["accumulation"]
        out: dict[float, str] = {}
        if accumulation > 1:
            out[1 / accumulation] = f"divided by the {accumulation} accumulated micro batches once more"
            out[float(accumulation)] = f"not divided by the {accumulation} accumulated micro batches"
        if dp > 1:
            out[1 / dp] = f"divided by the {dp} data-parallel ranks once more than summed"
            out[float(dp)] = f"summed over the {dp} data-parallel ranks instead of averaged"
        return out

    def _weighted_loss(self, loss: float | None) -> str | None:
        """Cause of a wrong loss, if one set of weights of the micro batches explains it."""
        losses = self.reference.get("losses") or []
        if loss is None or self.resumed or not losses:
            return None
        values, total = np.array([row[2] for row in losses]), sum(row[1] for row in losses)
        close = [
            cause for cause, weights in self._candidates().items()
            if difference(float(weights @ values) / total, loss) <= max(self.tolerance.numbers, 1e-5)
        ]  # fmt: skip
        return close[0] if close else None

    def _weighted_gradients(self, step: Record, names: list[str]) -> str | None:
        """Cause of wrong gradients, if one set of weights of the reference's micro batches explains all of them."""
        parts = self.reference.get("parts")
        if not parts or self.resumed or len(names) < len(parts) + 2:
            return None
        expected = self.reference["steps"][0]
        scale = np.array([Gap(*expected["gradients"][name]).rr ** 0.5 for name in names])
        matrix = np.array([[part[name] for part in parts] for name in names]) / scale[:, None]
        mine = np.array([step["projections"][name] for name in names]) / scale
        weights, *_ = np.linalg.lstsq(matrix, mine, rcond=None)
        off = float(np.linalg.norm(matrix @ weights - mine)) / max(float(np.linalg.norm(mine)), 1e-30)
        if off > 10 * self.tolerance.floor:
            return None
        for cause, candidate in self._candidates().items():
            if abs(candidate - weights).max() < 1e-2:
                return cause
        return f"its micro batches are weighted by {', '.join(f'{w:.3g}' for w in weights)} instead of 1"

    # ---- gradients

    def _idle_ranks(self, held: list[dict[str, int]]) -> Iterator[Finding]:
        """Ranks that report nothing of what others have a part of."""
        if sum(self.record["sizes"].values()) < 64 * len(held):
            return  # so little that a rank may hold nothing
        for kind in sorted(set().union(*held)):
            if idle := [rank for rank, own in enumerate(held) if not own.get(kind)]:
                what = {"param": "parameter", "grad": "gradient"}.get(kind, f"{kind} of the optimizer")
                yield self._finding(
                    "state", f"rank {_numbers(idle)} reports no {what}", "look at shards, gradients and held_state",
                    (), idle,
                )  # fmt: skip

    def _wrong(self, number: int, step: Record, expected: Record) -> list[str]:
        """Parameters whose gradient in a step is not the reference's, the one that points to the cause first."""
        noise = self.tolerance.tensors(number, "gradients")
        theirs = expected["gradients"]
        floor = _SMALL * math.sqrt(sum(p[-1] for p in theirs.values() if math.isfinite(p[-1])))
        excess: dict[str, float] = {}
        for name, products in step["gradients"].items():
            gap, limit = Gap(*products), noise.limit(name)
            if gap.relative > limit and not gap.dd <= (limit * math.sqrt(gap.rr) + floor) ** 2:
                excess[name] = gap.relative / limit
        return self._sorted(excess)

    def _sorted(self, excess: dict[str, float]) -> list[str]:
        """Names by how much they are off; where errors flow from a block to those before it, that block's first."""
        names = sorted(excess, key=lambda name: -excess[name])
        in_order = sorted(excess, key=lambda name: self.order.get(name, 0))
        if len(names) > 2 and excess[names[0]] < 3 * excess[names[1]]:
            last = next((n for n in reversed(in_order) if n not in self.record["tied"]), names[0])
            names.remove(last)
            names.insert(0, last)
        return names

    def _gradients(self, number: int, step: Record, expected: Record) -> Iterator[Finding]:
        mine, theirs = step["gradients"], expected["gradients"]
        when = f"in step {number} "
        if apart := self._apart(step["gradient_spread"], self.tolerance.floor):
            ranks = self._ranks(apart, step["gradient_ranks"])
            yield self._finding(
                "gradients", f"{when}the ranks hold different gradients of {_list(apart)}",
                "a missing all-reduce, so each rank trains a model of its own", apart, ranks,
            )  # fmt: skip
        if lacking := sorted(theirs.keys() - mine.keys()):
            yield self._finding(
                "gradients", f"{when}there is no gradient of {_list(lacking)}",
                "frozen or lost in wrapping, or not reported by `gradients`", lacking,
            )  # fmt: skip
        wrong = self._wrong(number, step, expected)
        if not wrong:
            return
        gaps = {name: Gap(*mine[name]) for name in wrong}
        ranks = self._ranks(wrong, step["gradient_ranks"])
        said = f"{when}the gradient of {_list(wrong)}"
        if len(wrong) >= 0.8 * sum(Gap(*p).rr > 0 for p in mine.values()):
            ratios = [gap.ratio for gap in gaps.values()]
            if max(gap.residual for gap in gaps.values()) <= 0.02 * abs(ratios[0]) and _alike(ratios):
                yield self._finding(
                    "gradients", f"{when}every gradient is {ratios[0]:.4g} times the reference's",
                    self._scale_cause(ratios[0]), wrong, ranks,
                )  # fmt: skip
            if number == self.first and (cause := self._weighted_gradients(step, [n for n in wrong if gaps[n].rr])):
                yield self._finding("gradients", f"{when}every gradient differs", cause, wrong, ranks)
        ratio, worst = gaps[wrong[0]].ratio, gaps[wrong[0]]
        straight = all(gap.residual <= 0.02 * abs(gap.ratio) for gap in gaps.values())
        by = f"by {worst.relative:.1e} of its norm"
        cause = f"the backward of that module ({len(wrong)} of {len(mine)} tensors differ)"
        if len(wrong) >= 0.8 * len(mine):
            cause = (
                "all tensors differ: what precedes them, such as the loss, its mask, the last block or the samples"
            )
        if precision := _precision([math.sqrt(gap.dd / gap.rr) for gap in gaps.values() if gap.rr], len(mine)):
            cause = f"gradients are summed or exchanged in {precision}"
        elif straight and _alike([gap.ratio for gap in gaps.values()]):
            by = f"{ratio:.4g} times the reference's"
            if abs(ratio) < 1e-3:
                cause = "it is left out of the backward, or set to zero"
            elif {*wrong} <= {*self.record["tied"]}:
                cause = "a tied weight, which is counted once for each of its uses" if ratio > 1 else (
                    "a tied weight, of whose uses some are left out"
                )  # fmt: skip
            elif ratio > 1.5 and abs(ratio - round(ratio)) < 1e-3:
                cause = f"it is added once for each of {ratio:.0f} ranks or uses"
            elif 1 / max(ratio, 1e-9) > 1.5 and abs(1 / ratio - round(1 / ratio)) < 1e-3:
                cause = f"it is divided by {1 / ratio:.0f} ranks or uses once too often, or some do not add theirs"
            else:
                cause = "it is scaled by itself"
        elif worst.rr and difference(math.sqrt(max(worst.dd + 2 * worst.dr + worst.rr, 0.0)), worst.rr**0.5) < 1e-4:
            cause = "it has the same numbers in other places: a matrix that is cut or put together otherwise"
        yield self._finding("gradients", f"{said} differs ({by})", cause, wrong, ranks)

    def _scale_cause(self, ratio: float) -> str:
        for usual, hint in self._scales().items():
            if math.isclose(ratio, usual, rel_tol=1e-2):
                return f"they are {hint}"
        return "the loss or its gradients are scaled differently; look at the loss scale and gradient_scale"

    # ---- update and state

    def _rates(self, number: int, step: Record, expected: Record) -> Iterator[Finding]:
        mine, theirs = step["rates"], expected["rates"]
        if len(mine) != len(theirs) or any(difference(a, b) > 1e-9 for a, b in zip(mine, theirs, strict=True)):
            here, there = (", ".join(f"{rate:.6g}" for rate in rates) for rates in (mine, theirs))
            yield self._finding(
                "learning rate", f"step {number} is made with the learning rate {here} instead of {there}",
                f"the schedule must advance once for each applied step, not for each micro batch "
                f"({self.record['accumulation']} here) or rank",
            )  # fmt: skip

    def _weights(self, number: int, step: Record, expected: Record) -> Iterator[Finding]:
        noise = self.tolerance.tensors(number, "weights")
        if apart := self._apart(step["weight_spread"], _EPSILON):
            yield self._finding(
                "update", f"after step {number} the ranks hold different weights of {_list(apart)}",
                "an update that does not reach the other ranks", apart, self._ranks(apart, step["weight_ranks"]),
            )  # fmt: skip
        excess, decays, gaps = dict[str, float](), dict[str, float](), dict[str, Gap]()
        quiet = self._still(number)
        for name, (dd, dm, dw, mm, _, ww) in step["weights"].items():
            gaps[name] = Gap(dd, dm, mm)
            limit = noise.limit(name) * math.sqrt(mm) + _EPSILON * math.sqrt(ww)
            if name not in quiet and not math.sqrt(dd) <= limit:
                excess[name] = math.sqrt(dd) / max(limit, 1e-30)
            if dd and ww and dw**2 > 0.8 * dd * ww:
                decays[name] = math.sqrt(dd)
            if excess.get(name) and not math.isfinite(dd):
                excess[name] = math.inf
        if not excess:
            return
        wrong = sorted(excess, key=lambda name: -excess[name])
        ranks = self._ranks(wrong, step["weight_ranks"])
        ratios = [gaps[name].ratio for name in wrong]
        rounded = [(step["weights"][n][0] / step["weights"][n][5]) ** 0.5 for n in wrong if step["weights"][n][5]]
        straight = all(gaps[n].residual <= 0.05 for n in wrong) and _alike(ratios, 0.05)
        cause = "the optimizer, its settings or its groups"
        if len({*wrong} & decays.keys()) >= 0.8 * len(wrong):
            cause = "weight decay: other parameters decay, or by another rate"
        elif straight and abs(ratios[0]) < 0.05:
            cause = "they are not updated"
        elif precision := _precision(rounded, len(rounded)):
            cause = f"weights are kept in {precision}, without fp32 masters"
        elif straight:
            cause = f"its update is {ratios[0]:.3g} times the reference's: clipping, the loss scale or the rate"
        elif moments := next(self._state(step, number, "update"), None) if "state" in step else None:
            cause = f"{moments.cause} (so say the optimizer's moments)"
        yield self._finding(
            "update",
            f"step {number} moves {_list(wrong)} otherwise (off by {gaps[wrong[0]].relative:.1e} of its way), with "
            f"equal gradients and rates",
            cause, wrong, ranks,
        )  # fmt: skip

    def _still(self, number: int) -> set[str]:
        """Parameters that rounding alone moves, such as the bias of attention's keys, another way each time."""
        steps = [step["gradients"] for step_number, step in self.steps.items() if step_number <= number]
        floors = [_SMALL * math.sqrt(sum(p[-1] for p in s.values() if math.isfinite(p[-1]))) for s in steps]
        norms = {name: [math.sqrt(s[name][-1]) if name in s else 0.0 for s in steps] for name in steps[0]}
        return {
            name for name, found in norms.items()
            if any(found) and all(norm <= floor for norm, floor in zip(found, floors, strict=True))
        }  # fmt: skip

    def _state(self, step: Record, number: int, phase: Phase, exact: bool = False) -> Iterator[Finding]:
        """State after a step against the reference's, or what was saved or loaded against what is held."""
        when = {"checkpoint": "the checkpoint", "resume": "what is loaded from the checkpoint"}.get(
            phase, f"the state after step {number}, and so a checkpoint,"
        )
        if step["missing"] or step["surplus"]:
            what = f"lacks {_list(step['missing'])}" if step["missing"] else f"has {_list(step['surplus'])} besides"
            names = [entry.partition(" of ")[2] for entry in step["missing"] or step["surplus"]]
            yield self._finding(phase, f"{when} {what}", "look at shards and held_state", names)
        for kind, measured in step["state"].items():
            noise = self.tolerance.tensors(number, "state", kind)
            quiet = self._still(number) if not exact else set()
            gaps = {name: Gap(*products) for name, products in measured.items()}
            limits = {n: 0.0 if exact or kind == "step" else noise.limit(n) for n in gaps}
            if kind == "param" and not exact:
                continue
            off = {n: gap.relative for n, gap in gaps.items() if n not in quiet and gap.relative > limits[n]}
            excess = {n: relative / max(limits[n], 1e-9) for n, relative in off.items()}
            if not excess:
                continue
            wrong = sorted(excess, key=lambda name: -excess[name])
            ranks = self._ranks(wrong, step["state_ranks"].get(kind, {}))
            what = "weight" if kind == "param" else f"optimizer's {kind}"
            if exact:
                verb = "is not what was saved" if phase == "resume" else "is not what the runner holds"
                cause = "it is not read back into the memory that trains" if phase == "resume" else (
                    "shards gives something else than what trains"
                )  # fmt: skip
                if all(math.isclose(gaps[n].dd, gaps[n].rr, rel_tol=1e-6) for n in wrong):
                    cause = "it starts at zero: the state is not loaded"
                yield self._finding(phase, f"the {what} of {_list(wrong)} {verb}", cause, wrong, ranks)
                continue
            yield self._finding(
                phase, f"after step {number} the {what} of {_list(wrong)} differs, with equal gradients",
                self._moment_cause(kind, [gaps[n] for n in wrong]), wrong, ranks,
            )  # fmt: skip

    def _moment_cause(self, kind: str, gaps: list[Gap]) -> str:
        ratios = [gap.ratio for gap in gaps]
        clip, norm = self.record["clip"], self.rows[self.first]["grad_norm"]
        factor = min(1.0, clip / norm) if clip and norm else 1.0
        if precision := _precision([gap.relative for gap in gaps], len(gaps)):
            return f"moments are kept in {precision}"
        if all(gap.residual <= 0.02 * abs(gap.ratio) for gap in gaps) and _alike(ratios):
            power = 2 if "sq" in kind else 1
            if factor < 1 and math.isclose(ratios[0], factor**-power, rel_tol=0.02):
                return "gradients are not clipped"
            if factor < 1 and math.isclose(ratios[0], factor**power, rel_tol=0.02):
                return "gradients are clipped twice"
            return f"it is {ratios[0]:.4g} times the reference's: clipping, unscaling or their order"
        return "held_state, pieces, or the optimizer's settings"

    def _apart(self, spread: dict[str, float], most: float) -> list[str]:
        """Parameters whose copies on the ranks differ by more than `most`, those most apart first."""
        return sorted((n for n, apart in spread.items() if apart > most), key=lambda name: -spread[name])


def _alike(values: list[float], most: float = 1e-3) -> bool:
    return max(values) - min(values) <= most * max(abs(values[0]), 1e-9) and math.isfinite(values[0])


def _precision(relative: list[float], of: int) -> str | None:
    """The type to whose precision tensors are rounded, if the relative differences of most of them say so."""
    if len(relative) < max(3, 0.5 * of):
        return None
    # A rounding to p bits is off by up to 2^-p, and by 0.3 to 0.6 times that in the mean square.
    for name, epsilon in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        if sum(0.2 * epsilon < value < 0.8 * epsilon for value in relative) >= 0.8 * len(relative):
            return name
    return None


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"
