"""Published models by name or path."""

from __future__ import annotations

from pathlib import Path

from crosstrain.errors import CheckpointError


def pretrained_folder(source: str) -> Path:
    """A local Hugging Face folder with safetensors weights: `source` itself, or the hub's model of that name.

    Raises CheckpointError where there is neither.
    """
    path = Path(source)
    if (path / "config.json").is_file():
        return path
    if path.exists():
        raise CheckpointError(f"{source}: no config.json, so it is not a Hugging Face model folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json", "merges.txt"]))
    except Exception as error:  # many kinds: no network, no such name, no permission
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{source}: neither a folder nor a model that the hub gave ({reason})") from None
