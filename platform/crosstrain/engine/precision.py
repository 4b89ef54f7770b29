"""Mixed precision with the same semantics under every runner, and loss scaling with Megatron's semantics.

Master weights, moments and gradients are fp32; autocast runs the forward's matmuls in bf16 or fp16. fp16 needs loss
scaling, because small gradients would underflow. The loss is multiplied by the scale before the backward, and the
gradients are divided by the scale afterwards. A step with overflowed gradients is skipped.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from crosstrain.config.run_options import AmpOptions
from crosstrain.utils.errors import CheckpointError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_products() -> None:
    """Let torch compute fp32 products on a CPU with oneDNN instead of MKL, if oneDNN does not round their inputs.

    On AMD CPUs with AVX-512, oneDNN takes less than half of MKL's time. torch calls oneDNN for fp32 matrices only if it
    may round them to bf16. oneDNN does so only on CPUs with special instructions, such as AMX: the product with an
    identity matrix shows whether this is such a CPU.
    """
    exact = torch.linspace(1, 2, 1 << 16).view(256, 256)
    torch.set_float32_matmul_precision("medium")
    if not torch.equal(exact @ torch.eye(256), exact):
        torch.set_float32_matmul_precision("highest")


@contextmanager
def mkl_products() -> Iterator[None]:
    """Undo `choose_products` in the block: oneDNN needs more time to prepare many small products than MKL in all."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


class LossScaler:
    """A loss scale that is halved on overflow and doubled after `window` steps without overflow.

    If `window` is None, the scale is constant. The first `hysteresis - 1` overflows only lower the tolerance, like
    `delayed_shift` in Megatron-LM (fp16/loss_scaler.py). Example: with hysteresis 2, a scale of 2^32 falls to 2^17 in
    16 skipped steps. The tolerance is restored whenever the scale grows.
    """

    _kept: ClassVar = {"scale": float, "tolerance": int, "steps_since_overflow": int}  # in checkpoints

    def __init__(self, scale: float, window: int | None = None, hysteresis: int = 1, min_scale: float = 0.0) -> None:
        self.scale, self.window, self.hysteresis, self.min_scale = scale, window, hysteresis, min_scale
        self.tolerance = hysteresis
        self.steps_since_overflow = 0

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step. overflow: True if the step's gradients overflowed."""
        if self.window is None:
            return
        if overflow:
            self.steps_since_overflow = 0
            if self.tolerance > 1:
                self.tolerance -= 1
            else:
                self.scale = max(self.scale / 2, self.min_scale)
        else:
            self.steps_since_overflow += 1
            if self.steps_since_overflow % self.window == 0:
                self.scale *= 2
                self.tolerance = self.hysteresis

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. The state is empty if the scale is constant."""
        return {name: getattr(self, name) for name in self._kept} if self.window is not None else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state, unless the scale is constant or the state is empty.

        Raises CheckpointError if the state is malformed.
        """
        if self.window is not None and state:
            try:
                vars(self).update({name: kind(state[name]) for name, kind in self._kept.items()})
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"the checkpoint's loss-scale state is malformed ({error!r})") from None


class Precision:
    """Autocast context and loss scaler of `run.amp`."""

    def __init__(self, options: AmpOptions, device_type: str) -> None:
        self.options = options
        self.dtype = DTYPES[options.dtype]
        self.device_type = device_type
        self.in_parameters = False  # True: parameters already have the compute dtype, so autocast is off
        dynamic = options.loss_scale is None and options.dtype == "fp16"
        adapting = (options.initial_scale, options.window, options.hysteresis, options.min_scale)
        self.scaler = LossScaler(*adapting) if dynamic else LossScaler(options.loss_scale or 1.0)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager for every forward in training, evaluation and generation."""
        if self.dtype == torch.float32 or self.in_parameters:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    @property
    def overflows(self) -> bool:
        """True if occasional gradient overflows are expected; they lower the loss scale."""
        return self.options.dtype == "fp16"

    def update_scale(self, attempted: bool, applied: bool) -> None:
        """Adapt the loss scale after a step. A step that was rejected because of its loss does not count."""
        if attempted and (applied or self.overflows):
            self.scaler.update(overflow=not applied)
