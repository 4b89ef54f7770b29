"""Published models by name or path."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crosstrain.utils.errors import CheckpointError, explained, first_line
from crosstrain.utils.files import last_checkpoint, read_regular
from crosstrain.utils.foreign_weights import foreign_weights
from crosstrain.utils.paths import near
from crosstrain.utils.trust import check_source


@dataclass(frozen=True)
class Excerpt:
    """The part of a published tensor that a parameter is: its rows from `first` on, of `rows` in all."""

    name: str
    first: int
    rows: int


@dataclass(frozen=True)
class Stack:
    """Published tensors that make a parameter [n, rows, ...]: for each of n, equal parts of its rows, in order."""

    names: tuple[tuple[str, ...], ...]


Place = str | Excerpt | Stack


def names_at(place: Place) -> set[str]:
    """Names of the published tensors of a place."""
    if isinstance(place, Stack):
        return {name for parts in place.names for name in parts}
    return {place if isinstance(place, str) else place.name}


@dataclass(frozen=True)
class Source:
    """A folder of published safetensors weights for some of a model's parameters, all by canonical name."""

    folder: Path
    place: Callable[[str, set[str]], Place]  # of a parameter, in a folder that holds these names
    covers: Callable[[str], bool] = lambda name: True
    of_model: bool = False  # an earlier run's, all of which has to be used; later checkpoints hold it, too


def pretrained_folder(source: str) -> Path:
    """A local Hugging Face folder with safetensors weights: `source`, its last checkpoint, or the hub's model.

    Raises CheckpointError where there is neither, and ConfigError where the configuration is not trusted with it. A
    model whose options name a file or a folder opens it by this, or asks `crosstrain.utils.trust.check_source` first.
    """
    check_source(f"the pretrained model {source}")
    path = last_checkpoint(Path(source).expanduser())
    if (adapter := path / "adapter_config.json").is_file() and not any(path.glob("model*.safetensors")):
        with explained(f"{adapter}: cannot be read"):
            config = json.loads(read_regular(adapter, 1 << 24))
            kind, base = config["peft_type"].lower(), config.get("base_model_name_or_path") or "BASE"
        raise CheckpointError(
            f"{source}: holds an adapter and not the model below it; begin with both by model.pretrained: {base} and "
            f"model.adapter: {{name: {kind}, pretrained: {source}}}"
        )
    if (path / "config.json").is_file():
        return path
    if foreign := foreign_weights(path):
        raise CheckpointError(f"{source}: {foreign}")
    if path.exists():
        raise CheckpointError(f"{source}: no config.json, so it is neither a Hugging Face model folder nor a run's")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json", "merges.txt"]))
    except Exception as error:  # many kinds: no network, no such name, no permission
        reason = first_line(error)
        said = f"{source}: neither a folder nor a model that the hub gave ({reason})"
        raise CheckpointError("; ".join(filter(None, (said, near(path))))) from None
