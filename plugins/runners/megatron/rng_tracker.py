"""RNG states of tensor-parallel ranks: one common state, and one fork per rank.

All ranks of a tensor-parallel group have the same seed, so dropout is equal where they hold the same activations.
Where each rank holds its own heads or its own part of the sequence, equal masks would correlate the dropout noise of
the ranks, so each rank forks the common state.
"""

import torch
from torch import Tensor

from crosstrain import derive_seed, has_values


class RngTracker:
    """The default random number generator of a device; each rank can fork it.

    A fork depends only on the generator's state and the rank. Gradient checkpointing restores the state before it
    recomputes, so the recomputation draws the same random numbers.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self._states: tuple[Tensor, Tensor] | None = None  # inside a fork: (common state, initial state of the fork)

    def state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def set_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device) if self.device.type == "cuda" else torch.set_rng_state(state)

    def fork(self) -> None:
        """Continue with this rank's random numbers."""
        state = self.state()
        if not has_values(state):  # in a memory plan, tensors have no values
            return
        seed = derive_seed("tensor parallel", state.numpy().tobytes().hex(), self.rank)
        torch.cuda.manual_seed(seed) if self.device.type == "cuda" else torch.manual_seed(seed)

    def enter(self) -> None:
        """Fork until `leave`."""
        common = self.state()
        self.fork()
        self._states = common, self.state()

    def leave(self) -> None:
        """Restore the common random numbers. Does nothing without a previous `enter`."""
        if self._states is None:
            return
        (common, forked), self._states = self._states, None
        drawn = not torch.equal(self.state(), forked)
        self.set_state(common)
        if drawn:  # if nothing was drawn, the state stays the same as with one process
            torch.rand(1, device=self.device)  # so that the next fork differs, even if nothing is drawn in between
