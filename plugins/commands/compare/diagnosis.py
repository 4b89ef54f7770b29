"""Find the earliest difference between two recorded runs, and the likely cause of this difference."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from . import causes
from .forward import first_module, flipped
from .tolerance import Gap, Record, Tolerance, copies_apart, difference, listed, numbered, steps_of

Phase = Literal[
    "samples", "forward", "gradients", "norm", "learning rate", "update", "state", "evaluation", "checkpoint", "export",
    "resume",
]  # fmt: skip

_NORM = 1e-5  # larger relative differences of a norm from the norm of the same gradients are errors
MOST = 0.8  # at least this fraction of the tensors counts as nearly all


@dataclass(frozen=True)
class Finding:
    """The first difference between a run and the reference."""

    phase: Phase
    sentence: str
    parameters: list[str] = field(default_factory=list)  # most informative first
    ranks: list[int] = field(default_factory=list)  # ranks with the difference; empty: not limited to some ranks
    cause: str = ""


def diagnose(record: Record, reference: Record, tolerance: Tolerance, resumed: bool = False) -> Finding | None:
    """Return the earliest difference, or None if the two runs match."""
    return next(_Judge(record, reference, tolerance, resumed).findings(), None)


class _Judge:
    def __init__(self, record: Record, reference: Record, tolerance: Tolerance, resumed: bool) -> None:
        self.record, self.reference, self.tolerance, self.resumed = record, reference, tolerance, resumed
        self.rows = {row["step"]: row for row in reference["rows"]}
        self.steps, self.mine = steps_of(reference), steps_of(record)
        called = {module: place for place, module in enumerate(reference["steps"][0]["activations"])}
        in_order = sorted(record["names"], key=lambda name: called.get(name.rpartition(".")[0], len(called)))
        self.order = {name: place for place, name in enumerate(in_order)}  # the order of the forward

    def _norm(self, row: Record, theirs: Record, step: Record, expected: Record) -> Iterator[Finding]:
        """Compare the gradient norm with the norm of the recorded gradients, and with the reference's norm."""
        number, mine, right = row["step"], row["grad_norm"], theirs["grad_norm"]
        squares = {name: dd + 2 * dr + rr for name, (dd, dr, rr) in step["gradients"]["products"].items()}
        own = math.sqrt(max(sum(squares.values()), 0.0))
        said = f"the gradient norm of step {number} is {mine} instead of {right}"
        if math.isfinite(own) and difference(mine, own) > _NORM:
            ratio = (mine or math.inf) / max(own, 1e-30)
            cause, names = causes.norm_cause(ratio, squares, step["gradients"]["copies"], self.record, _NORM)
            yield self._finding("norm", f"{said}, with equal gradients", cause, names)
        elif difference(mine, right) > self.tolerance.norms:
            place, names = self._place(number, step, expected)
            cause = place if names else "no tensor alone differs by more than rounding"
            yield self._finding("gradients", f"{said}, and that is the gradients' norm", cause, names)

    def findings(self) -> Iterator[Finding]:
        """Yield all differences in the order in which they occur."""
        record, reference = self.record, self.reference
        if self.resumed:
            yield from self._state(record["loaded"], record["rows"][0]["step"] - 1, "resume", exact=True)
        for row in record["rows"]:
            number = row["step"]
            step, theirs, expected = self.mine[number], self.rows[number], self.steps[number]
            yield from self._samples(row, theirs, step, expected)
            if number == 1:
                yield from self._evaluation(row, step, expected)
            if not record["exact"]:  # ranks step independently, so only the first forward has to agree
                continue
            yield from self._loss(row, theirs, step, expected)
            yield from self._idle("gradient", step["gradients"])
            yield from self._gradients(number, step, expected)
            yield from self._norm(row, theirs, step, expected)
            if step["rates"] != expected["rates"] and (
                len(step["rates"]) > 1 or difference(step["rates"][0], expected["rates"][0]) > 1e-9
            ):
                here, there = (", ".join(f"{rate:.6g}" for rate in found["rates"]) for found in (step, expected))
                yield self._finding(
                    "learning rate",
                    f"step {number} uses the learning rate {here} instead of {there}",
                    causes.rate_cause(step["rates"], number - theirs["skipped_steps"], record, reference),
                )
            yield from self._weights(number, step, expected)
            if "state" in step and "state" in expected:
                yield from self._state(step, number, "state")
                for kind, measured in step["state"].items():
                    yield from self._idle("parameter" if kind == "param" else f"{kind} of the optimizer", measured)
        later = record.get("later_loss")
        if record["exact"] and later is not None and self._differs(later, reference["later_loss"]):
            yield self._finding(
                "evaluation",
                f"after training the loss in evaluation mode is {later:.7g} instead of {reference['later_loss']:.7g}, "
                f"with equal weights",
                "`evaluate`, or weights that it does not refresh",
            )
        if (saved := record.get("saved")) and "error" in saved:
            yield self._finding("checkpoint", saved["error"], "look at held.shards and held.state")
        elif saved:
            yield from self._state(saved, record["rows"][-1]["step"], "checkpoint", exact=True)
        for name, what in record.get("strange_files", {}).items():
            cause = "a process that did not train writes it otherwise: the model's configuration or adapter was changed"
            yield self._finding("export", f"the checkpoint's {name}, which an export copies, {what}", cause)

    def _differs(self, a: float | None, b: float | None) -> bool:
        return difference(a, b) > self.tolerance.losses

    def _finding(
        self, phase: Phase, sentence: str, cause: str, parameters: Iterable[str] = (), off: Any = None
    ) -> Finding:
        """Make a finding. `off`: ranks with the difference, if not all, or a dict from parameters to such ranks."""
        names, ranks = list(parameters), off or []
        if isinstance(ranks, dict):
            ranks = sorted(set.intersection(*(set(ranks.get(name, ())) for name in names)))
        when = "after a resume, " if self.resumed and phase != "resume" else ""
        who = f" (only on rank {', '.join(map(str, ranks))})" if ranks else ""
        return Finding("resume" if self.resumed else phase, f"{when}{sentence}{who}: {cause}", names, ranks, cause)

    # ---- before the backward

    def _samples(self, row: Record, theirs: Record, step: Record, expected: Record) -> Iterator[Finding]:
        number = row["step"]
        mine, wanted = step["data"], expected["data"]
        if [*mine] != [*wanted]:
            here, there = (numbered([int(n) for n in found]) for found in (mine, wanted))
            yield self._finding(
                "samples",
                f"the micro batches of step {number} begin with samples {here} instead of {there}",
                "ranks of `dp` must have different samples, and all others those of their `dp` rank",
            )
        if row["samples"] != theirs["samples"]:
            yield self._finding(
                "samples",
                f"step {number} ended at sample {row['samples']} instead of {theirs['samples']}",
                "`dp` and data_parallel_size, which select and count the samples",
            )
        for sample, fields in wanted.items():
            if other := [key for key in fields if mine[sample].get(key) != fields[key]]:
                yield self._finding(
                    "samples",
                    f"in step {number} the micro batch that begins at sample {sample} has different {', '.join(other)}",
                    "the data and their order must not depend on the runner, its ranks or its processes",
                )

    def _evaluation(self, row: Record, step: Record, expected: Record) -> Iterator[Finding]:
        loss, wanted = self.record["plain_loss"], self.reference["plain_loss"]
        if difference(loss, wanted) <= self.tolerance.first_losses:
            return
        said = f"before the first step, in evaluation mode, the loss is {loss:.7g} instead of {wanted:.7g}"
        if self._differs(row["loss"], self.rows[1]["loss"]) or self._wrong(1, step, expected):
            place, names = self._place(1, step, expected)
            yield self._finding("forward", said, f"the weights or the forward differ; {place}", names)
        ratio = loss / wanted
        cause = causes.usual_scale(ratio, self.record) or (
            f"`evaluate` or `evaluating`, or how they sum the losses and count the targets: {ratio:.6g} times as large"
        )
        if self.record["plain_training"] and not self.reference["plain_training"]:
            cause = "a part of the model is in training mode (dropout)"
        yield self._finding("evaluation", f"{said}, although training agrees", cause)

    def _place(self, number: int, step: Record, expected: Record) -> tuple[str, list[str]]:
        """Describe the first place in the forward that differs, and return the parameters there."""
        module, said = self._first_module(number, step, expected)
        return said, [name for name in self.record["names"] if name.rpartition(".")[0] == module]

    def _first_module(self, number: int, step: Record, expected: Record) -> tuple[str, str]:
        noise = {} if self.tolerance.noise is None else steps_of(self.tolerance.noise)[number]["activations"]
        return first_module(step["activations"], expected["activations"], noise, self.tolerance.least)

    def _loss(self, row: Record, theirs: Record, step: Record, expected: Record) -> Iterator[Finding]:
        loss, number = row["loss"], row["step"]
        limit = self.tolerance.first_losses if number == 1 else self.tolerance.losses
        if difference(loss, theirs["loss"]) <= limit:
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
            cause = f"the model is in {mode} mode; a validation may have left it so"
        elif number > 1:
            said += ", with equal weights and samples"
            place = f"a forward that depends on more than these, such as random numbers, buffers or the mode; {place}"
        elif self.tolerance.random(self.reference):
            said += ", although in evaluation mode the losses agree"
            if names and "after the batch" not in place:  # dropout cannot change the first module's input
                why = (
                    "ranks that share samples may draw different ones, so compare with the model's dropout set to 0"
                    if any(r["dp_size"] < r["world_size"] for r in (self.record, self.reference))
                    else "a runner must not seed them, by rank for example"
                )
                place = f"random numbers (dropout) differ; {why}; {place}"
        else:
            said += ", although in evaluation mode the losses agree and nothing is random"
            place = f"compute_loss and forward_backward, the mask or the targets that only training uses; {place}"
        yield self._finding("forward", said, cause or place, () if cause else names)

    def _routing(self, number: int, step: Record, expected: Record) -> str | None:
        """Explain a difference by near ties that were decided differently, or by a wrong mean in the router losses."""
        mine, theirs = step["routing"], expected["routing"]
        noise = self.tolerance.noise
        usual = None if noise is None else steps_of(noise)[number]["routing"]["near"]
        tie, module = flipped(mine["near"], theirs["near"], usual), self._first_module(number, step, expected)[0]
        block = next((int(part) for part in module.split(".") if part.isdigit()), None)
        if tie is not None and (block is None or block >= tie[0]):  # a difference in an earlier block is no tie
            return tie[1]
        if module or not self._differs(mine["loss"], theirs["loss"]):
            return None
        return (
            f"the routers' losses are {mine['loss']} instead of {theirs['loss']}, from equal logits: means over "
            f"different tokens, such as those of a micro batch"
        )

    # ---- gradients

    def _idle(self, what: str, measured: Record) -> Iterator[Finding]:
        """Yield a finding if some ranks report no tensors although other ranks do."""
        if idle := measured["idle"]:
            yield self._finding(
                "state",
                f"rank {numbered(idle)} reports no {what}",
                "look at held.shards, held.gradients and held.state",
                off=idle,
            )

    def _wrong(self, number: int, step: Record, expected: Record) -> list[str]:
        """Return the parameters with a wrong gradient in a step, most informative first."""
        if self.tolerance.is_exact:
            return self._sorted(dict.fromkeys(self._unequal(step["gradients"], expected["gradients"]), 0.0))
        limit_of = self.tolerance.limits(number, "gradients")
        floor = self._floor(expected["gradients"]["products"])
        excess: dict[str, float] = {}
        for name, products in step["gradients"]["products"].items():
            gap, limit = Gap(*products), limit_of(name)
            if gap.relative > limit and not gap.dd <= (limit * math.sqrt(gap.rr) + floor) ** 2:
                excess[name] = gap.relative / max(limit, 1e-30)
        return self._sorted(excess)

    def _unequal(self, measured: Record, expected: Record) -> list[str]:
        """Return the tensors with different hashes if every difference is an error, else []."""
        mine = measured["hashes"] if self.tolerance.is_exact else {}
        return [name for name in mine if mine[name] != expected["hashes"].get(name)]

    def _floor(self, gradients: dict[str, list[float]]) -> float:
        """Return the norm below which a gradient is only rounding error, from the products of a step's gradients."""
        return self.tolerance.small * math.sqrt(sum(p[-1] for p in gradients.values() if math.isfinite(p[-1])))

    def _lacking(self, step: Record, expected: Record) -> list[str]:
        """Return the parameters without a gradient, or with only a part of their gradient."""
        lost = expected["gradients"]["products"].keys() - step["gradients"]["products"].keys()
        return sorted(lost) + step["gradients"]["partial"]

    def _sorted(self, excess: dict[str, float]) -> list[str]:
        """Sort parameters by error, largest first; without rounding, in the order of the backward.

        If several errors are similar, the last parameter in model order comes first: the backward carries an error
        from a block to all blocks before it.
        """
        names = sorted(excess, key=lambda name: -excess[name])
        in_order = sorted(excess, key=lambda name: self.order.get(name, 0))
        if self.tolerance.is_exact:
            return in_order[::-1]
        if len(names) > 2 and excess[names[0]] < 3 * excess[names[1]]:
            last = next((n for n in reversed(in_order) if n not in self.record["tied"]), names[0])
            return [last, *(name for name in names if name != last)]
        return names

    def _gradients(self, number: int, step: Record, expected: Record) -> Iterator[Finding]:
        mine, off, when = step["gradients"]["products"], step["gradients"]["off"], f"in step {number} "
        if apart := copies_apart(step["gradients"], self.tolerance.floor):
            yield self._finding(
                "gradients",
                f"{when}the ranks hold different gradients of {listed(apart)}",
                "a missing all-reduce, so each rank trains its own model",
                apart,
                off,
            )
        if lacking := self._lacking(step, expected):
            yield self._finding(
                "gradients",
                f"{when}there is no gradient of {'a part of ' * (lacking[0] in mine)}{listed(lacking)}",
                "frozen or lost in wrapping, or not reported by `gradients`",
                lacking,
            )
        wrong = self._wrong(number, step, expected)
        if not wrong:
            return
        gaps = {name: Gap(*mine[name]) for name in wrong}
        worst, said = gaps[wrong[0]], f"{when}the gradient of {listed(wrong)} differs"
        rounded = causes.rounded(step["gradients"], expected["gradients"], wrong)
        ratio = None if rounded else causes.multiple([*gaps.values()])
        nonzero = sum(Gap(*p).rr > 0 for p in mine.values())
        most = len(wrong) >= MOST * nonzero
        if most and ratio is not None:
            said = f"{when}every gradient is {ratio:.4g} times the reference's"
        elif most and (mixed := self._mixture(number, step, expected)):
            yield self._finding("gradients", f"{when}every gradient differs", mixed, wrong, off)
        by = f" (by {worst.relative:.1e} of its norm)"
        cause = f"{len(wrong)} of {len(mine)} tensors differ: look at their backward, and at how ranks reduce them"
        if not worst.rr or not math.isfinite(worst.dd):
            by = " (it is not finite)" if worst.rr else " (the reference's is zero)"
        if {*wrong} <= {*self.record["tied"]}:
            cause = "a tied weight, so the gradient of one of its uses is wrong or missing"
        elif len(wrong) >= nonzero:
            cause = "all tensors differ: look before them, at the loss, its mask, the last block or the samples"
        if rounded:
            cause = f"gradients are summed or exchanged in {rounded}: all values are {rounded} numbers"
        elif ratio is not None:
            by = "" if most else f" ({ratio:.4g} times the reference's)"
            cause = causes.scaled(ratio, None if most else wrong, self.record)
        elif not (place := self._place(number, step, expected)[0]).startswith("no module"):
            cause = f"a forward with about the same loss, or a recomputation with different dropout; {place}"
        elif abs(2 * worst.dr + worst.dd) < 1e-3 * worst.dd:
            cause = "it has the same numbers in different places: a matrix that is sharded or assembled differently"
        elif sized := causes.size_of_rounding(gaps.values()):
            cause = f"the differences have the size of rounding errors of {sized}, as if sums or exchanges used it"
        cause = self._routing(number, step, expected) or cause
        yield self._finding("gradients", f"{said}{by}", cause, wrong, off)

    def _mixture(self, number: int, step: Record, expected: Record) -> str | None:
        """Explain gradients that weight micro batches wrongly, or that contain gradients of the previous step."""
        sizes = {name: Gap(*products).rr ** 0.5 for name, products in expected["gradients"]["products"].items()}
        if number == 1 and (parts := self.reference.get("parts")):
            weights, rest = causes.solve(parts, step["projections"], sizes)
            if rest <= self.tolerance.mixed:
                return causes.weighting(self.record, self.reference["micro_batches"], weights)
            without = self.reference.get("parts_without_routers", [])
            return causes.router_weight(parts, without, step["projections"], sizes, self.tolerance.mixed)
        if number - 1 in self.steps:
            columns = [expected["projections"], self.steps[number - 1]["projections"]]
            weights, rest = causes.solve(columns, step["projections"], sizes)
            if rest <= 10 * self.tolerance.mixed and abs(weights[1]) > 1e-2:
                return (
                    f"they are {weights[0]:.3g} times the reference's and {weights[1]:.3g} times those of the step "
                    f"before: left over, not set to zero, or stale"
                )
        return None

    # ---- update and state

    def _weights(self, number: int, step: Record, expected: Record) -> Iterator[Finding]:
        limit_of = self.tolerance.limits(number, "weights")
        measured = step["narrow_weights" if self.tolerance.is_narrow else "weights"]
        weights, off = measured["products"], measured["off"]
        if apart := copies_apart(measured, self.tolerance.weights):
            yield self._finding(
                "update",
                f"after step {number} the ranks hold different weights of {listed(apart)}",
                "an update that does not reach the other ranks",
                apart,
                off,
            )
        excess, gaps, quiet = dict[str, float](), dict[str, Gap](), self._still(number)
        unequal = self._unequal(measured, expected["weights"])
        for name, (dd, dm, _, mm, _, ww) in weights.items():
            gaps[name] = Gap(dd, dm, mm)
            limit = limit_of(name) * math.sqrt(mm) + self.tolerance.weights * math.sqrt(ww)
            if name in unequal or (name not in quiet and not math.sqrt(dd) <= limit):
                excess[name] = math.sqrt(dd) / max(limit, 1e-30) if math.isfinite(dd) else math.inf
        if not excess:
            return
        wrong = sorted(excess, key=lambda name: -excess[name])
        worst = gaps[wrong[0]]
        by = f"(off by {worst.relative:.1e} of the update)" if worst.rr else "(the reference's do not change)"
        said = f"step {number} updates {listed(wrong)} differently {by}, with equal gradients and rates"
        if self._unseen(number + 1, sum(weights[n][0] for n in wrong), weights):
            yield self._finding(
                "state",
                said,
                "`shards` reports, and a checkpoint saves, other tensors than those that train, because the "
                "gradients of the next step agree",
                wrong,
                off,
            )
        rounded = causes.rounded(measured, expected["weights"], wrong)
        # dot products of difference d, update m and weight w
        decayed = [bool(ww) and dw**2 > 0.99 * dd * ww for dd, _, dw, _, _, ww in map(weights.__getitem__, wrong)]
        ratio = causes.multiple([gaps[name] for name in wrong])
        moments = next(self._state(step, number, "update"), None) if "state" in step else None
        cause = "the optimizer, its settings or its groups"
        if sum(decayed) >= MOST * len(wrong):
            cause = "weight decay: different parameters decay, or at a different rate"
        elif other := causes.other_setting(self.record["settings"], self.reference["settings"]):
            cause = other
        elif ratio is not None and abs(ratio) < 0.05:
            cause = "they are not updated"
        elif rounded:
            cause = f"weights are kept in {rounded}, without fp32 masters"
        elif not (place := self._place(number, step, expected)[0]).startswith("no module"):
            yield self._finding("forward", said, f"a forward that differs too little for the loss; {place}", wrong, off)
        elif moments:
            cause = causes.small_gradient(step, wrong[0]) or f"{moments.cause} (according to the optimizer's moments)"
        elif causes.lacks_bias_correction([gaps[name] for name in wrong], number, self.reference["betas"]):
            cause = "Adam's moments are used without their bias correction"
        elif ratio is not None:
            cause = causes.update_cause(ratio, number, self.reference["schedule"])
        yield self._finding("update", said, cause, wrong, off)

    def _unseen(self, number: int, error: float, weights: dict[str, list[float]]) -> bool:
        """Return True if the weights' error should change the next step's gradients, but these gradients agree."""
        if number not in self.mine or math.sqrt(error / sum(p[5] for p in weights.values())) < self.tolerance.shows:
            return False
        return not self._wrong(number, self.mine[number], self.steps[number])

    def _still(self, number: int) -> set[str]:
        """Return the parameters with updates that are only rounding error, such as the bias of attention keys.

        These updates may differ between any two runs.
        """
        steps = [step["gradients"]["products"] for step_number, step in self.steps.items() if step_number <= number]
        floors = [self._floor(step) for step in steps]
        norms = {name: [math.sqrt(s[name][-1]) if name in s else 0.0 for s in steps] for name in steps[0]}
        return {
            name
            for name, found in norms.items()
            if any(found) and all(norm <= floor for norm, floor in zip(found, floors, strict=True))
        }

    def _state(self, step: Record, number: int, phase: Phase, exact: bool = False) -> Iterator[Finding]:
        """Compare the state after a step with the reference's, or a checkpoint's state with the state in memory."""
        when = {"checkpoint": "the checkpoint", "resume": "the state loaded from the checkpoint"}.get(
            phase, f"the state after step {number}, and so a checkpoint,"
        )
        for verb, entries in (("lacks", step["missing"]), ("also has", step["surplus"])):
            if entries:
                yield self._finding(
                    phase,
                    f"{when} {verb} {listed(entries)}",
                    "look at held.shards and held.state",
                    dict.fromkeys(entry.rpartition(" of ")[2] for entry in entries),
                )
        quiet = set() if exact else self._still(number)
        for kind, measured in step["state"].items():
            if kind == "param" and not exact:
                continue
            limit_of = self.tolerance.limits(number, "state", kind)
            what = "weight" if kind == "param" else f"optimizer's {kind}"
            if apart := copies_apart(measured, 0.0 if exact else self.tolerance.weights):
                yield self._finding(
                    phase,
                    f"{when} differs between ranks in the {what} of {listed(apart)}",
                    "each rank must read and update all copies that it holds",
                    apart,
                    measured["off"],
                )
            gaps = {name: Gap(*products) for name, products in measured["products"].items()}
            limits = {n: 0.0 if exact or kind == "step" else limit_of(n) for n in gaps}
            unequal = [] if exact else self._unequal(measured, self.steps[number]["state"][kind])
            excess = {
                n: gap.relative / max(limits[n], 1e-9)
                for n, gap in gaps.items()
                if n in unequal or (n not in quiet and gap.relative > limits[n])
            }
            if not excess:
                continue
            wrong = sorted(excess, key=lambda name: -excess[name])
            off, found = measured["off"], [gaps[name] for name in wrong]
            what = f"the {what} of {listed(wrong)}"
            if not exact:
                said = f"after step {number} {what} differs, with equal gradients"
                rounded = causes.rounded(measured, self.steps[number]["state"][kind], wrong)
                yield self._finding(
                    phase, said, causes.moment_cause(kind, found, self.record, self.reference, rounded), wrong, off
                )
                continue
            said = f"{what} is not what {'was saved' if phase == 'resume' else 'the runner holds'}"
            cause = (
                "it is not read back into the memory that trains"
                if phase == "resume"
                else ("shards returns other tensors than those that train")
            )
            if all(math.isclose(gap.dd, gap.rr, rel_tol=1e-6) for gap in found):
                cause = "it starts at zero: the state is not loaded" if phase == "resume" else "zeros are saved"
            elif len(types := {measured["rounded"].get(name) for name in wrong}) == 1 and None not in types:
                cause = f"it is rounded to {types.pop()}"
            elif (ratio := causes.multiple(found)) is not None:
                cause = f"it is scaled by {ratio:.4g}"
            yield self._finding(phase, said, cause, wrong, off)
