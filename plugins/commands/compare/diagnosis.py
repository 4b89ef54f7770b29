"""Find the first difference between two recorded runs, in the order of events, and its likely cause."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from . import causes
from .forward import flipped
from .tolerance import Gap, Record, Tolerance, difference, steps_of

Phase = Literal[
    "samples", "forward", "gradients", "norm", "learning rate", "update", "state", "evaluation", "checkpoint", "export",
    "resume",
]  # fmt: skip

_SMALL = 1e-7  # gradients below this fraction of the global gradient norm are only rounding error
_EPSILON = 2.0**-22  # relative rounding error of fp32 weights over a few steps
_MOST = 0.8  # at least this fraction of the tensors counts as nearly all


@dataclass(frozen=True)
class Finding:
    """The first difference between a run and the reference."""

    phase: Phase
    sentence: str
    parameters: list[str] = field(default_factory=list)  # largest error first
    ranks: list[int] = field(default_factory=list)  # the only ranks that differ; empty: not limited to certain ranks
    cause: str = ""


def diagnose(record: Record, reference: Record, tolerance: Tolerance, resumed: bool = False) -> Finding | None:
    """Return the first difference in the order of events, or None if both runs trained alike."""
    return next(_Judge(record, reference, tolerance, resumed).findings(), None)


class _Judge:
    def __init__(self, record: Record, reference: Record, tolerance: Tolerance, resumed: bool) -> None:
        self.record, self.reference, self.tolerance, self.resumed = record, reference, tolerance, resumed
        self.rows = {row["step"]: row for row in reference["rows"]}
        self.steps, self.mine = steps_of(reference), steps_of(record)

    def findings(self) -> Iterator[Finding]:
        """Yield all differences in the order of events."""
        record, reference = self.record, self.reference
        if self.resumed:
            yield from self._state(record["loaded"], record["rows"][0]["step"] - 1, "resume", exact=True)
        for row in record["rows"]:
            number = row["step"]
            step, theirs, expected = self.mine[number], self.rows[number], self.steps[number]
            yield from self._samples(number, step, expected)
            if number == 1:
                yield from self._evaluation(row, step, expected)
            if not record["exact"]:  # ranks step independently, so only the first forward has to agree
                continue
            yield from self._loss(row, theirs, step, expected)
            yield from self._gradients(number, step, expected)
            if self._differs(row["grad_norm"], theirs["grad_norm"]):
                here, there = row["grad_norm"], theirs["grad_norm"]
                yield self._finding(
                    "norm",
                    f"the gradient norm of step {number} is {here} instead of {there} over equal gradients",
                    causes.norm_cause((here or math.inf) / (there or math.inf), record, self.tolerance.numbers),
                )
            if step["rates"] != expected["rates"] and (
                len(step["rates"]) > 1 or difference(step["rates"][0], expected["rates"][0]) > 1e-9
            ):
                here, there = (", ".join(f"{rate:.6g}" for rate in found["rates"]) for found in (step, expected))
                yield self._finding(
                    "learning rate",
                    f"step {number} is made with the learning rate {here} instead of {there}",
                    causes.rate_cause(step["rates"]),
                )
            yield from self._weights(number, step, expected)
            if "state" in step and "state" in expected:
                yield from self._state(step, number, "state")
        later = record.get("later_loss")
        if record["exact"] and later is not None and self._differs(later, reference["later_loss"]):
            yield self._finding(
                "evaluation",
                f"after training the loss in evaluation mode is {later:.7g} instead of {reference['later_loss']:.7g}, "
                f"over equal weights",
                "`evaluate`, or weights that it does not refresh",
            )
        if (saved := record.get("saved")) and "error" in saved:
            yield self._finding("checkpoint", saved["error"], "look at held.shards and held.state")
        elif saved:
            yield from self._state(saved, record["rows"][-1]["step"], "checkpoint", exact=True)
        for name, what in record.get("strange_files", {}).items():
            yield self._finding(
                "export",
                f"the checkpoint's {name}, which an export copies, {what}",
                "a process that has not trained writes it otherwise: its model's configuration or adapter was changed",
            )

    def _differs(self, a: float | None, b: float | None) -> bool:
        return difference(a, b) > self.tolerance.numbers

    def _finding(
        self,
        phase: Phase,
        sentence: str,
        cause: str,
        names: Sequence[str] = (),
        off: dict[str, list[int]] | None = None,
    ) -> Finding:
        """Make a finding about the parameters `names`. `off`: parameter -> the only ranks that differ."""
        only = [set((off or {}).get(name, ())) for name in names]
        ranks = sorted(set.intersection(*only)) if only else []
        when = "after a resume, " if self.resumed and phase != "resume" else ""
        who = f" (on rank {', '.join(map(str, ranks))} alone)" if ranks else ""
        return Finding("resume" if self.resumed else phase, f"{when}{sentence}{who}: {cause}", [*names], ranks, cause)

    # ---- before the backward

    def _samples(self, number: int, step: Record, expected: Record) -> Iterator[Finding]:
        mine, wanted = step["data"], expected["data"]
        if [*mine] != [*wanted]:
            here, there = (_numbers([int(n) for n in found]) for found in (mine, wanted))
            yield self._finding(
                "samples",
                f"the micro batches of step {number} begin with samples {here} instead of {there}",
                "ranks of `dp` must have numbers of their own, and all others those of their `dp` rank",
            )
        for sample, fields in wanted.items():
            if other := [key for key in fields if mine[sample].get(key) != fields[key]]:
                yield self._finding(
                    "samples",
                    f"in step {number} the micro batch that begins with sample {sample} has other {', '.join(other)}",
                    "the data and their order must not depend on the runner, its ranks or its processes",
                )

    def _evaluation(self, row: Record, step: Record, expected: Record) -> Iterator[Finding]:
        loss, wanted = self.record["plain_loss"], self.reference["plain_loss"]
        if not self._differs(loss, wanted):
            return
        said = f"before the first step, in evaluation mode, the loss is {loss:.7g} instead of {wanted:.7g}"
        if self._differs(row["loss"], self.rows[1]["loss"]) or self._wrong(1, step, expected):
            place, names = self._place(1, step, expected)
            yield self._finding("forward", said, f"the weights or the forward differ; {place}", names)
        ratio = loss / wanted
        cause = causes.usual_scale(ratio, self.record) or (
            f"`evaluate` or `evaluating`, the mode (dropout), or how they sum the losses and count the targets: it is "
            f"{ratio:.6g} times"
        )
        yield self._finding("evaluation", f"{said}, although training agrees", cause)

    def _place(self, number: int, step: Record, expected: Record) -> tuple[str, list[str]]:
        """Describe the first place in the forward that differs, and return the parameters there."""
        noise = {} if self.tolerance.noise is None else steps_of(self.tolerance.noise)[number]["activations"]
        before = "the batch"
        for module, theirs in expected["activations"].items():
            mine, rounding = step["activations"].get(module, theirs), noise.get(module, theirs)
            names = [n for n in self.record["names"] if n.rpartition(".")[0] == module]
            limits = [max(self.tolerance.numbers, 16 * difference(a, b)) for a, b in zip(rounding, theirs, strict=True)]
            if difference(mine[0], theirs[0]) > limits[0]:
                return (
                    f"the first difference is what {module} is given, behind {before}, such as positions, a mask, "
                    f"attention or dropout",
                    names,
                )
            if difference(mine[1], theirs[1]) > limits[1]:
                return f"the first difference is what comes out of {module}: its weights, or how it is cut", names
            before = module
        return "no module's output differs, but the loss that is made of them: its targets, its sum or its mean", []

    def _loss(self, row: Record, theirs: Record, step: Record, expected: Record) -> Iterator[Finding]:
        loss, number = row["loss"], row["step"]
        if not self._differs(loss, theirs["loss"]):
            return
        said = f"the loss of step {number} is {loss} instead of {theirs['loss']}"
        same = not self._wrong(number, step, expected) and not self._lacking(step, expected)
        place, names = ("look at what forward_backward returns", []) if same else self._place(number, step, expected)
        cause = None
        if routed := self._routing(number, step, expected):
            yield self._finding("forward", said, routed)
            return
        if same:
            said += ", although its gradients agree"
            usual = causes.usual_scale((loss or math.inf) / (theirs["loss"] or math.inf), self.record)
            cause = f"it is {usual}" if usual else None
        elif number == 1 and (mixed := self._mixture(number, step, expected)):
            cause = mixed
        elif step["training"] != expected["training"]:
            mode = "training" if step["training"] else "evaluation"
            cause = f"the model is in {mode} mode, as a validation may leave it"
        elif number > 1:
            said += ", over equal weights and samples"
            place = f"a forward that depends on more than these, such as random numbers, buffers or the mode; {place}"
        elif self.tolerance.random(self.reference):
            said += ", although in evaluation mode the losses agree"
            if names and "behind the batch" not in place:  # dropout cannot change the first module's input
                place = (
                    f"random numbers (dropout) differ: a runner must not seed them, by rank for example; ranks that "
                    f"share samples may draw their own, so compare those with the model's dropout set to 0; {place}"
                )
        else:
            said += ", although in evaluation mode the losses agree and nothing is random"
            place = f"compute_loss and forward_backward, the mask or the targets that training alone sees; {place}"
        yield self._finding("forward", said, cause or place, () if cause else names)

    def _routing(self, number: int, step: Record, expected: Record) -> str | None:
        """Explain a difference by flipped near ties, or by router losses that differ for equal module outputs."""
        mine, theirs = step["routing"], expected["routing"]
        if tie := flipped(mine["near"], theirs["near"]):
            return tie
        alike = self._place(number, step, expected)[0].startswith("no module")
        if not alike or not self._differs(mine["loss"], theirs["loss"]):
            return None
        return (
            f"the routers' losses are {mine['loss']} instead of {theirs['loss']}, from equal logits: means over "
            f"other tokens, such as a micro batch's"
        )

    # ---- gradients

    def _wrong(self, number: int, step: Record, expected: Record) -> list[str]:
        """Return the parameters with a wrong gradient in a step, largest error first."""
        limit_of = self.tolerance.limits(number, "gradients")
        theirs = expected["gradients"]["products"]
        floor = _SMALL * math.sqrt(sum(p[-1] for p in theirs.values() if math.isfinite(p[-1])))
        excess: dict[str, float] = {}
        for name, products in step["gradients"]["products"].items():
            gap, limit = Gap(*products), limit_of(name)
            if gap.relative > limit and not gap.dd <= (limit * math.sqrt(gap.rr) + floor) ** 2:
                excess[name] = gap.relative / limit
        return _largest_first(excess)

    def _lacking(self, step: Record, expected: Record) -> list[str]:
        """Return the parameters that have no gradient, or only a part of one."""
        lost = expected["gradients"]["products"].keys() - step["gradients"]["products"].keys()
        return sorted(lost) + step["gradients"]["partial"]

    def _gradients(self, number: int, step: Record, expected: Record) -> Iterator[Finding]:
        mine, off, when = step["gradients"]["products"], step["gradients"]["off"], f"in step {number} "
        if apart := _apart(step["gradients"], self.tolerance.floor):
            yield self._finding(
                "gradients",
                f"{when}the ranks hold different gradients of {_list(apart)}",
                "a missing all-reduce, so each rank trains a model of its own",
                apart,
                off,
            )
        if lacking := self._lacking(step, expected):
            yield self._finding(
                "gradients",
                f"{when}there is no gradient of {'a part of ' * (lacking[0] in mine)}{_list(lacking)}",
                "frozen or lost in wrapping, or not reported by `gradients`",
                lacking,
            )
        wrong = self._wrong(number, step, expected)
        if not wrong:
            return
        gaps = {name: Gap(*mine[name]) for name in wrong}
        worst, said = gaps[wrong[0]], f"{when}the gradient of {_list(wrong)} differs"
        rounded = causes.rounding(gaps.values())
        ratio = None if rounded else causes.multiple([*gaps.values()])
        most = len(wrong) >= _MOST * sum(Gap(*p).rr > 0 for p in mine.values())
        if most and ratio is not None:
            said = f"{when}every gradient is {ratio:.4g} times the reference's"
        elif most and (mixed := self._mixture(number, step, expected)):
            yield self._finding("gradients", f"{when}every gradient differs", mixed, wrong, off)
        by = f" (by {worst.relative:.1e} of its norm)"
        cause = f"the backward of that module ({len(wrong)} of {len(mine)} tensors differ)"
        if most:
            cause = "all tensors differ: what precedes them, such as the loss, its mask, the last block or the samples"
        if rounded:
            cause = f"gradients are summed or exchanged in {rounded}"
        elif ratio is not None:
            by = "" if most else f" ({ratio:.4g} times the reference's)"
            cause = causes.scaled(ratio, None if most else wrong, self.record)
        elif not (place := self._place(number, step, expected)[0]).startswith("no module"):
            cause = f"a forward with about the same loss, or one that the backward repeats with other dropout; {place}"
        cause = self._routing(number, step, expected) or cause
        yield self._finding("gradients", f"{said}{by}", cause, wrong, off)

    def _mixture(self, number: int, step: Record, expected: Record) -> str | None:
        """Explain gradients that weight micro batches wrongly, or that contain gradients of the previous step."""
        sizes = {name: Gap(*products).rr ** 0.5 for name, products in expected["gradients"]["products"].items()}
        if number == 1 and (parts := self.reference.get("parts")):
            weights, rest = causes.solve(parts, step["projections"], sizes)
            return (
                None
                if rest > 10 * self.tolerance.floor
                else (causes.weighting(self.record, self.reference["micro_batches"], weights))
            )
        if number - 1 in self.steps:
            columns = [expected["projections"], self.steps[number - 1]["projections"]]
            weights, rest = causes.solve(columns, step["projections"], sizes)
            if rest <= 100 * self.tolerance.floor and abs(weights[1]) > 1e-2:
                return (
                    f"they are {weights[0]:.3g} times the reference's and {weights[1]:.3g} times those of the step "
                    f"before: left over, not set to zero, or stale"
                )
        return None

    # ---- update and state

    def _weights(self, number: int, step: Record, expected: Record) -> Iterator[Finding]:
        limit_of, measured = self.tolerance.limits(number, "weights"), step["weights"]
        weights, off = measured["products"], measured["off"]
        if apart := _apart(measured, _EPSILON):
            yield self._finding(
                "update",
                f"after step {number} the ranks hold different weights of {_list(apart)}",
                "an update that does not reach the other ranks",
                apart,
                off,
            )
        excess, gaps, quiet = dict[str, float](), dict[str, Gap](), self._still(number)
        for name, (dd, dm, _, mm, _, ww) in weights.items():
            gaps[name] = Gap(dd, dm, mm)
            limit = limit_of(name) * math.sqrt(mm) + _EPSILON * math.sqrt(ww)
            if name not in quiet and not math.sqrt(dd) <= limit:
                excess[name] = math.sqrt(dd) / max(limit, 1e-30) if math.isfinite(dd) else math.inf
        if not excess:
            return
        wrong = _largest_first(excess)
        worst = gaps[wrong[0]]
        by = f"(off by {worst.relative:.1e} of its way)" if worst.rr else "(the reference's stay where they are)"
        said = f"step {number} moves {_list(wrong)} otherwise {by}, with equal gradients and rates"
        if self._unseen(number + 1, sum(weights[n][0] for n in wrong), weights):
            yield self._finding(
                "state",
                said,
                "`shards` reports, and a checkpoint saves, something else than what trains, for the "
                "gradients of the next step agree",
                wrong,
                off,
            )
        along = [weights[name] for name in wrong]  # dot products of difference d, update m and weight w
        decayed = [bool(ww) and dw**2 > 0.99 * dd * ww for dd, _, dw, _, _, ww in along]
        askew = all(4 * dm**2 < dd * mm and 4 * dw**2 < dd * ww for dd, dm, dw, mm, _, ww in along)
        ratio = causes.multiple([gaps[name] for name in wrong])
        moments = next(self._state(step, number, "update"), None) if "state" in step else None
        cause = "the optimizer, its settings or its groups"
        if sum(decayed) >= _MOST * len(wrong):
            cause = "weight decay: other parameters decay, or by another rate"
        elif ratio is not None and abs(ratio) < 0.05:
            cause = "they are not updated"
        elif rounded := causes.precision([(p[0] / p[5]) ** 0.5 for p in along if p[5]], 1 if askew else 3):
            cause = f"weights are kept in {rounded}, without fp32 masters"
        elif not (place := self._place(number, step, expected)[0]).startswith("no module"):
            yield self._finding("forward", said, f"a forward that differs too little for the loss; {place}", wrong, off)
        elif moments:
            cause = f"{moments.cause} (so say the optimizer's moments)"
        elif ratio is not None:
            cause = f"its update is {ratio:.4g} times the reference's: clipping, the loss scale or the rate"
        yield self._finding("update", said, cause, wrong, off)

    def _unseen(self, number: int, error: float, weights: dict[str, list[float]]) -> bool:
        """True if the weights' error is large enough to change the next step's gradients, but those gradients agree."""
        if number not in self.mine or math.sqrt(error / sum(p[5] for p in weights.values())) < self.tolerance.shows:
            return False
        return not self._wrong(number, self.mine[number], self.steps[number])

    def _still(self, number: int) -> set[str]:
        """Return the parameters whose updates are only rounding error, such as the bias of attention keys.

        These updates may differ between any two runs.
        """
        steps = [step["gradients"]["products"] for step_number, step in self.steps.items() if step_number <= number]
        floors = [_SMALL * math.sqrt(sum(p[-1] for p in s.values() if math.isfinite(p[-1]))) for s in steps]
        norms = {name: [math.sqrt(s[name][-1]) if name in s else 0.0 for s in steps] for name in steps[0]}
        return {
            name
            for name, found in norms.items()
            if any(found) and all(norm <= floor for norm, floor in zip(found, floors, strict=True))
        }

    def _state(self, step: Record, number: int, phase: Phase, exact: bool = False) -> Iterator[Finding]:
        """Compare state after a step with the reference's, or the state in a checkpoint with the state in memory."""
        when = {"checkpoint": "the checkpoint", "resume": "what is loaded from the checkpoint"}.get(
            phase, f"the state after step {number}, and so a checkpoint,"
        )
        for verb, entries in (("lacks", step["missing"]), ("also has", step["surplus"])):
            names = [*dict.fromkeys(entry.rpartition(" of ")[2] for entry in entries)]
            if entries:
                yield self._finding(
                    phase, f"{when} {verb} {_list(entries)}", "look at held.shards and held.state", names
                )
        quiet = set() if exact else self._still(number)
        for kind, measured in step["state"].items():
            if kind == "param" and not exact:
                continue
            limit_of = self.tolerance.limits(number, "state", kind)
            what = "weight" if kind == "param" else f"optimizer's {kind}"
            if apart := _apart(measured, 0.0 if exact else _EPSILON):
                yield self._finding(
                    phase,
                    f"{when} differs between ranks in the {what} of {_list(apart)}",
                    "each must read and update all copies that it holds",
                    apart,
                    measured["off"],
                )
            gaps = {name: Gap(*products) for name, products in measured["products"].items()}
            limits = {n: 0.0 if exact or kind == "step" else limit_of(n) for n in gaps}
            excess = {
                n: gap.relative / max(limits[n], 1e-9)
                for n, gap in gaps.items()
                if n not in quiet and gap.relative > limits[n]
            }
            if not excess:
                continue
            wrong = _largest_first(excess)
            off, found = measured["off"], [gaps[name] for name in wrong]
            what = f"the {what} of {_list(wrong)}"
            if not exact:
                said = f"after step {number} {what} differs, with equal gradients"
                yield self._finding(phase, said, causes.moment_cause(kind, found), wrong, off)
                continue
            said = f"{what} is not what {'was saved' if phase == 'resume' else 'the runner holds'}"
            cause = (
                "it is not read back into the memory that trains"
                if phase == "resume"
                else ("shards gives something else than what trains")
            )
            if all(math.isclose(gap.dd, gap.rr, rel_tol=1e-6) for gap in found):
                cause = "it starts at zero: the state is not loaded"
            elif rounded := causes.rounding(found):
                cause = f"it is rounded to {rounded}"
            yield self._finding(phase, said, cause, wrong, off)


def _apart(measured: Record, most: float) -> list[str]:
    """Return the parameters with copies that differ between ranks by more than `most`, largest difference first."""
    return _largest_first({name: size for name, size in measured["apart"].items() if size > most})


def _largest_first(sizes: dict[str, float]) -> list[str]:
    return sorted(sizes, key=lambda name: -sizes[name])


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"
