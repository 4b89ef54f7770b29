"""torch.compile, the same for any model: in place, so that parameter names and checkpoints do not change."""

from __future__ import annotations

from typing import Literal

from crosstrain.modeling.base import Model

Mode = Literal["none", "blocks", "model"]


def compile_model(model: Model, mode: Mode) -> None:
    """`blocks` compiles each repeated block (one compilation serves all), `model` the whole forward."""
    if mode == "blocks":
        for block in model.blocks():
            block.compile()
    elif mode == "model":
        model.compile()
