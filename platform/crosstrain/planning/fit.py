"""Refuse a run whose memory cannot fit before it starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from crosstrain.config.load import Config
from crosstrain.config.registry import registry
from crosstrain.data.splits import first_batch, open_split, training_dataset
from crosstrain.engine.build import freeze, model_on_meta
from crosstrain.planning.estimate import Project
from crosstrain.planning.fake_world import without_weights
from crosstrain.planning.suggest import nearest, needs
from crosstrain.utils.errors import UserError
from crosstrain.utils.types import Batch
from crosstrain.utils.units import read_bytes, show_bytes


def refuse_what_cannot_fit(config: Config, world_size: int, device_memory: str | None) -> None:
    """UserError where the run needs more memory than its device has, if that is given or known."""
    limit = read_bytes(device_memory, "--device-memory") if device_memory else _known_memory(config)
    if limit is None:
        return
    project = _project(config)
    estimate = project.estimate(config.runner.name, config, world_size)
    if (needed := needs(estimate, project.device)) > limit:
        advice = nearest(project, config, {}, world_size, limit)
        raise UserError(
            f"a rank would need {show_bytes(needed)} of memory, and its device has {show_bytes(limit)}"
            f"{f'; {advice}' if advice else ''}; `crosstrain plan` shows other layouts, and --no-fit-check starts it"
        )


def _known_memory(config: Config) -> int | None:
    """Bytes of a GPU that is here; not known of a CPU, whose memory others use, too."""
    if config.run.device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


def _project(config: Config) -> Project:
    described, absent = without_weights(config.model, config.sized)
    model = model_on_meta(replace(config, model=described))
    freeze(model, config.run.freeze)
    device = config.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Project(config, model, _inputs(config), device, absent)


def _inputs(config: Config) -> Batch | None:
    """One sample's shapes, without the data if the dataset can tell, else of the first sample if the data is there."""
    component = training_dataset(config)
    shapes = registry.get("dataset", component.name).shapes(component.options)
    if shapes is not None:
        return shapes
    try:
        return first_batch(open_split(config, "train"))
    except (UserError, OSError):
        return None
