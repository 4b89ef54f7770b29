"""Mean squares of module inputs and outputs, to locate the module where a wrong forward begins."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crosstrain import Group, Model


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
                # Append instead of adding: selective checkpointing rejects operators that only the recomputation calls.
                sums[at].append(tensor.detach().double().square().sum())
                sums[at + 1].append(tensor.numel())

    def clear(self) -> None:
        self._sums = {}

    def means(self) -> dict[str, list[float]]:
        """Return a dict from modules, in order of their first call, to mean squares [input, output]. Collective.

        The means cover the calls since `clear`. Sharding, replication and recomputation do not change them.
        """
        mine = {place: [float(sum(of)) for of in sums] for place, sums in self._sums.items()}
        total: dict[str, list[float]] = {}
        for held in self.group.all_gather(mine):
            for place, sums in held.items():
                total[place] = [a + b for a, b in zip(sums, total.get(place, [0.0] * 4), strict=True)]
        return {place: [s[0] / max(s[1], 1), s[2] / max(s[3], 1)] for place, s in total.items()}
