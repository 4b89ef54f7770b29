"""What a run is, beside its tensors: this and the checkpoint's boxes are all that resuming needs."""

from __future__ import annotations

import math
import reprlib
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from crosstrain.checkpoint.checkpointer import load_state
from crosstrain.checkpoint.manifest import is_count
from crosstrain.errors import CheckpointError


@dataclass
class State:
    """Where a run stands. Random numbers are functions of the sample's number, so there are none to keep."""

    step: int = 0  # attempted steps
    applied_steps: int = 0  # of those, the ones whose update was made; the learning rate's clock
    samples: int = 0  # samples consumed; the number of the next one
    best_loss: float | None = None  # lowest validation loss so far
    scaler: dict[str, Any] = field(default_factory=dict)  # of the loss scale

    def improves(self, loss: float) -> bool:
        """Whether `loss` is the best so far; remembers it."""
        if not math.isfinite(loss) or (self.best_loss is not None and loss >= self.best_loss):
            return False
        self.best_loss = loss
        return True

    def document(self, **more: Any) -> dict[str, Any]:
        """As a checkpoint's state.json holds it."""
        return asdict(self) | more

    @staticmethod
    def load(checkpoint: Path) -> State:
        """Of a checkpoint; raises CheckpointError where it is malformed."""
        saved = load_state(checkpoint)
        try:
            state = State(**{field.name: saved[field.name] for field in fields(State)})
        except KeyError as error:
            raise CheckpointError(f"{checkpoint}: malformed state ({error} is missing)") from None
        sound = {
            "applied_steps": is_count(state.applied_steps),
            "samples": is_count(state.samples),
            "best_loss": state.best_loss is None or _is_number(state.best_loss),
            "scaler": isinstance(state.scaler, dict) and all(map(_is_number, state.scaler.values())),
        }
        for name, fine in sound.items():
            if not fine:
                raise CheckpointError(f"{checkpoint}: malformed state ({name} is {reprlib.repr(getattr(state, name))})")
        return state


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # neither infinite nor NaN
