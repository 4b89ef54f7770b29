"""Find the folders of pretrained models that options name: by a path, a name, or a file of another program."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from crosstrain.config.registry import registry
from crosstrain.config.sources import walk
from crosstrain.utils.errors import CheckpointError, DataError, first_line, os_errors_as
from crosstrain.utils.files import last_checkpoint, read_regular
from crosstrain.utils.foreign_weights import foreign_weights, lone_adapter
from crosstrain.utils.paths import missing, near
from crosstrain.utils.trust import check_source

NOTE = "conversion.txt"  # file in a converted folder: the source of the weights and what was lost, for the log
_MOST_BYTES = 1 << 22  # maximum size of a config.json
# Sizes in config.json that are checked, and their largest accepted values.
_SIZE = re.compile(
    r'"((?:n|num)_(?:hidden_|attention_|key_value_)?(?:layers?|heads?|embd|positions)|(?:hidden|intermediate|vocab|image|patch)_size'
    r'|d_model|max_position_embeddings)"\s*:\s*([-+\d.eE]*\d)'
)
_MOST, _LARGEST = {"layer": 10_000, "position": 1 << 31}, 10_000_000
_FILES = ["*.safetensors", "*.json", "merges.txt"]  # files that are downloaded from the Hugging Face Hub


def as_folder(path: Path) -> Path:
    """Return the folder into which a plugin converts the file `path`; any other path is returned unchanged.

    The plugin is the `converter` for the file's suffix. Raises DataError if there is no such file, and ConfigError if
    the configuration is not trusted to name files.
    """
    suffix = path.suffix.removeprefix(".")
    if suffix not in registry.names("converter") or path.is_dir():
        return path
    check_source(f"the file {path}")
    if not path.is_file():
        raise DataError(missing(path, [path]))
    return registry.get("converter", suffix)(path)


def convert_files(plain: Any) -> None:
    """Convert the files that a part of `Config.plain` names.

    Call this before a model is built, because that has limits of time and memory and may be on the meta device.
    """
    suffixes = tuple(f".{name}" for name in registry.names("converter"))
    for _, value in walk(plain):
        if isinstance(value, str) and value.endswith(suffixes) and os.path.isfile(os.path.expanduser(value)):
            as_folder(Path(value).expanduser())


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
    """Return a local Hugging Face folder with safetensors weights.

    The folder is `source`, its last checkpoint, a conversion of this file, or a download from the hub.

    Raises CheckpointError if none of these exists, and ConfigError if the configuration is not trusted to name
    pretrained models. Before a model opens a file or folder that its options name, it must call this function or
    `crosstrain.utils.trust.check_source`.
    """
    check_source(f"the pretrained model {source}")
    path = last_checkpoint(as_folder(Path(source).expanduser()))
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
