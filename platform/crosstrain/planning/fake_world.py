"""Ranks and values that do not exist, to ask how things would be with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from crosstrain.config.schema import Component


def without_weights(component: Component, sized: Component) -> tuple[Component, list[str]]:
    """A model's description without the `pretrained` folders that are not on this machine; and their names.

    A plan downloads nothing: the sizes are then those of `sized`, the same description with all that presets say.
    """
    absent: list[str] = []

    def strip(value: Any, sized: Any) -> Any:
        if not is_dataclass(value) or isinstance(value, type):
            return value
        folder = getattr(value, "pretrained", None)
        if isinstance(folder, str) and not Path(folder).exists():
            absent.append(folder)
            value = replace(sized, pretrained=None)
        changed = {f.name: strip(getattr(value, f.name), getattr(sized, f.name)) for f in fields(value) if f.init}
        return replace(value, **changed)

    return strip(component, sized), absent


@contextmanager
def pretended(world_size: int) -> Iterator[None]:
    """Inside, torch's process group seems to be of `world_size` ranks, this one the first; exchanges do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which registers the backend

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
