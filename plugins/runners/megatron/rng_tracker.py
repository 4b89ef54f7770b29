"""Random numbers of tensor-parallel ranks: common ones, and ones of each rank.

All ranks of a tensor-parallel group are seeded alike, so dropout is the same wherever they hold the same activations.
Where each holds its own heads or its own part of the sequence, equal masks would make the parts' noise equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crosstrain import derive_seed, has_values


class RngTracker:
    """The default generator of a device, and its forks by rank.

    A fork depends on nothing but the generator's state and the rank, so a recomputation, which begins with the state of
    the first time, draws the same again.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self._states: tuple[Tensor, Tensor] | None = None  # the common one and the fork's first, while in a fork

    def state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def set_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device) if self.device.type == "cuda" else torch.set_rng_state(state)

    def fork(self) -> None:
        """Continue with random numbers of this rank."""
        state = self.state()
        if not has_values(state):  # in a plan
            return
        seed = derive_seed("tensor parallel", state.numpy().tobytes().hex(), self.rank)
        torch.cuda.manual_seed(seed) if self.device.type == "cuda" else torch.manual_seed(seed)

    def enter(self) -> None:
        """Fork until `leave`."""
        common = self.state()
        self.fork()
        self._states = common, self.state()

    def leave(self) -> None:
        """Continue with the common random numbers. Does nothing without an `enter` before."""
        if self._states is None:
            return
        (common, forked), self._states = self._states, None
        drawn = not torch.equal(self.state(), forked)
        self.set_state(common)
        if drawn:  # else everything is as in one process, and stays so
            torch.rand(1, device=self.device)  # the next fork differs, though nothing else draws in between
