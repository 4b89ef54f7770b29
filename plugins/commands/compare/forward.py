"""Record a forward: mean squares at each module, to locate a wrong module, and near ties in expert routing.

Rounding may change the choice of experts at a near tie. Such a difference does not mean that a gradient is wrong.
"""

from collections.abc import Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from crosstrain import Group, MicroBatch, Model, Runner
from crosstrain.engine.runner import recorded_means
from crosstrain.modeling.routers import Choices

from .tolerance import difference, usual_difference

# "layer sample token" -> [margin, experts]; sample: first sample of the micro batch; token: position of the token
Near = dict[str, Any]

_NEAR = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}  # smaller margins between logits are near ties
_ROUNDING = 2.0**-20  # a few rounding errors of an fp32 logit near 1; exact ties may have no noise at all
_DEFAULT = 1e-3  # the same limit for fp32; far above rounding error, because weights differ in later steps


class Activations:
    """Records the inputs and outputs of every module that directly owns parameters."""

    def __init__(self, model: Model, group: Group) -> None:
        self.group = group
        self._sums: dict[str, list[Any]] = {}  # module -> squares and sizes of inputs, then of outputs
        for name, module in model.named_modules():
            for parameter, _ in [*module.named_parameters(name, recurse=False)][:1]:
                place = model.weights.canonical_name(parameter).rpartition(".")[0]
                module.register_forward_hook(partial(self._add, place), with_kwargs=True)

    def _add(self, place: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        sums = self._sums.setdefault(place, [[], [], [], []])
        for at, values in ((0, (*args, *kwargs.values())), (2, output if isinstance(output, tuple) else (output,))):
            if (tensor := next((v for v in values if isinstance(v, Tensor)), None)) is not None:
                # Sum the values later: selective checkpointing rejects operators that only the recomputation calls.
                sums[at].append(tensor.detach().double().square().sum())
                sums[at + 1].append(tensor.numel())

    def clear(self) -> None:
        self._sums = {}

    def means(self) -> dict[str, list[float]]:
        """Return a dict from modules, in order of their first call, to [input, output, calls]. Collective.

        Inputs and outputs are mean squares over the calls since `clear`. Sharding, replication and recomputation do not
        change the means. Calls are counted on all ranks.
        """
        mine = {place: [*(float(sum(of)) for of in sums), float(len(sums[2]))] for place, sums in self._sums.items()}
        total: dict[str, list[float]] = {}
        for held in self.group.all_gather(mine):
            for place, sums in held.items():
                total[place] = [a + b for a, b in zip(sums, total.get(place, [0.0] * 5), strict=True)]
        return {place: [s[0] / max(s[1], 1), s[2] / max(s[3], 1), s[4]] for place, s in total.items()}


def first_module(
    mine: dict[str, list[float]], theirs: dict[str, list[float]], noise: dict[str, list[float]], least: float
) -> tuple[str, str]:
    """Return the first module with different mean squares, "" if none differs, and a description of the place.

    noise: of a run that differs from `theirs` only by rounding; empty: not measured. least: lower bound on the limit.
    """
    before = "the batch"
    usual = usual_difference(noise, theirs)
    for module, right in theirs.items():
        found, rounding = mine.get(module, right), noise.get(module, right)
        limits = [max(least, 1e-12, 16 * max(usual, difference(a, b))) for a, b in zip(rounding, right, strict=True)]
        if difference(found[0], right[0]) > limits[0]:
            return module, (
                f"the first difference is the input of {module}, after {before}, such as positions, a mask, "
                f"attention or dropout"
            )
        if difference(found[1], right[1]) > limits[1]:
            return module, f"the first difference is the output of {module}: its weights, or how it is sharded"
        before = module
    return "", "no module's output differs, only the loss: its targets, its sum or its mean"


class Routing:
    """Records near ties in a runner's routers."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._near = _NEAR.get(runner.precision.dtype, _DEFAULT)
        self._seen: list[dict[tuple[int, int], list[Any]]] = []  # one dict per micro batch
        for routers in runner.model.structure.routers():
            if routers.parts is None and runner.context.size == 1:  # otherwise a rank has only parts of sequences
                routers.observe = self._add

    def clear(self) -> None:
        self._seen = []
        self.runner.model.take_recorded()

    def _add(self, seen: Choices) -> None:
        self._seen.append(nearly_tied(seen, self._near))

    def record(self, step: Iterable[MicroBatch]) -> dict[str, Any]:
        """Return the near ties of a step, and the loss that the routers add. Collective."""
        mine = {}
        for micro_batch, seen in zip(step, self._seen, strict=False):
            for (layer, token), found in seen.items():
                mine[f"{layer} {micro_batch.first_sample} {token}"] = found
        near = {key: found for held in self.runner.world.all_gather(mine) for key, found in held.items()}
        means = recorded_means(self.runner.model.take_recorded(), self.runner.world)
        return {"near": near, "loss": sum(routers.added(means) for routers in self.runner.model.structure.routers())}


def nearly_tied(seen: Choices, near: float) -> dict[tuple[int, int], list[Any]]:
    """Return a dict from (layer, token) to [margin, experts], for tokens with a margin between -`near` and `near`.

    The margin is the smallest logit of the chosen experts minus the largest logit of the others.
    """
    found = {}
    for layer, (logits, chosen) in seen.items():
        logits = logits.detach().float()
        margins: Tensor = logits.gather(1, chosen).amin(1) - logits.scatter(1, chosen, -torch.inf).amax(1)
        for token in (margins.abs() < near).nonzero().flatten().tolist():
            found[layer, token] = [margins[token].item(), sorted(chosen[token].tolist())]
    return found


def _moved(mine: Near, theirs: Near, layer: int) -> float:
    """Return the median change of a layer's margins between two runs, over near ties that both decide alike."""
    alike = [key for key, (_, chosen) in theirs.items() if key in mine and mine[key][1] == chosen]
    changes = [abs(mine[key][0] - theirs[key][0]) for key in alike if key.startswith(f"{layer} ")]
    return median(changes) if changes else 0.0


def flipped(mine: Near, theirs: Near, noise: Near | None) -> tuple[int, str] | None:
    """Return the first layer where two runs choose different experts at a near tie, and a sentence about the tie.

    noise: of a run that differs from `theirs` only by rounding; None: not measured. Returns None if all choices agree,
    or if rounding alone does not move the margins so far.
    """
    keys = [key for key, (_, chosen) in theirs.items() if key in mine and mine[key][1] != chosen]
    if not keys:
        return None
    layer, sample, token = min(tuple(map(int, key.split())) for key in keys)
    if noise is not None and _moved(mine, theirs, layer) > max(16 * _moved(noise, theirs, layer), _ROUNDING):
        return None
    more = f" and for {len(keys) - 1} more tokens" if len(keys) > 1 else ""
    return layer, (
        f"routing differs at layer {layer}, token {token} of sample {sample}, by a margin of "
        f"{abs(theirs[f'{layer} {sample} {token}'][0]):.1e}{more}: a tie that rounding decides, not a wrong gradient"
    )
