"""Find pretrained models by name or path."""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from crosstrain.utils.errors import CheckpointError, first_line, os_errors_as
from crosstrain.utils.files import last_checkpoint, read_regular
from crosstrain.utils.foreign_weights import foreign_weights, lone_adapter
from crosstrain.utils.paths import near
from crosstrain.utils.trust import check_source


@dataclass(frozen=True)
class Excerpt:
    """A parameter that is a slice of a pretrained tensor.

    first: the slice's first row in that tensor. rows: number of rows of the whole tensor.
    """

    name: str
    first: int
    rows: int


@dataclass(frozen=True)
class Stack:
    """A parameter [n, rows, ...] that is a stack of pretrained tensors.

    names: for each of the n entries, the names of the tensors that are concatenated along the rows. All these tensors
    have the same number of rows.
    """

    names: tuple[tuple[str, ...], ...]


Place = str | Excerpt | Stack
_MOST_BYTES = 1 << 22  # maximum size of a config.json
# Sizes in config.json that are checked, and their largest accepted values.
_SIZE = re.compile(
    r'"((?:n|num)_(?:hidden_|attention_|key_value_)?(?:layers?|heads?|embd|positions)|(?:hidden|intermediate|vocab|image|patch)_size'
    r'|d_model|max_position_embeddings)"\s*:\s*([-+\d.eE]*\d)'
)
_MOST, _LARGEST = {"layer": 10_000, "position": 1 << 31}, 10_000_000
_FILES = ["*.safetensors", "*.json", "merges.txt"]  # files that are downloaded from the Hugging Face Hub


def names_at(place: Place) -> set[str]:
    """Return the names of the pretrained tensors that a place refers to."""
    if isinstance(place, Stack):
        return {name for parts in place.names for name in parts}
    return {place if isinstance(place, str) else place.name}


@dataclass(frozen=True)
class Source:
    """A folder of pretrained safetensors weights for some of a model's parameters. Parameter names are canonical."""

    folder: Path
    place: Callable[[str, set[str]], Place]  # (parameter, names in the folder) -> place of the parameter
    covers: Callable[[str], bool] = lambda name: True
    of_model: bool = False  # True: an earlier run's weights; the model must use all of them, and checkpoints store them


def downloaded(name: str) -> Path | None:
    """Return the local folder of a downloaded hub model; None if the model or a part of it is not downloaded."""
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # the library raises many exception types, also for invalid names
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
        index = folder / "model.safetensors.index.json"
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else ()
        whole = any(folder.glob("*.safetensors")) and all((folder / file).is_file() for file in files)
        return folder if whole else None
    return None


def _check_sizes(file: Path) -> None:
    """Raise CheckpointError if a size in a config.json, at any depth, is outside of the accepted range."""
    with os_errors_as(CheckpointError, f"{file}: cannot be read"):
        content = read_regular(file, _MOST_BYTES).decode("utf-8", "replace")
    for key, value in _SIZE.findall(content):
        most = next((most for kind, most in _MOST.items() if kind in key), _LARGEST)
        if not 1 <= float(value) <= most:
            raise CheckpointError(f"{file}: {key} is {value}; expected 1 to {most}")


def pretrained_folder(source: str) -> Path:
    """Return a local Hugging Face folder with safetensors weights: `source`, its last checkpoint, or a hub download.

    Raises CheckpointError if none of these exists, and ConfigError if the configuration is not trusted to name
    pretrained models. Before a model opens a file or folder that its options name, it must call this function or
    `crosstrain.utils.trust.check_source`.
    """
    check_source(f"the pretrained model {source}")
    path = last_checkpoint(Path(source).expanduser())
    if foreign := lone_adapter(path, source):
        raise CheckpointError(f"{source}: {foreign}")
    if described := os.path.lexists(path / "config.json"):
        _check_sizes(path / "config.json")
    if not any(path.glob("*.safetensors")) and (foreign := foreign_weights(path)):
        raise CheckpointError(f"{source}: {foreign}")
    if described:
        return path
    if path.exists():
        raise CheckpointError(f"{source}: no config.json; expected a Hugging Face model folder or a run's folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=_FILES))
    except Exception as error:  # many exception types: no network, no such name, no permission
        said = f"{source}: not a folder, and cannot be downloaded from the Hugging Face Hub ({first_line(error)})"
        raise CheckpointError("; ".join(filter(None, (said, near(path))))) from None
