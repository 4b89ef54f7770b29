"""Compare the files that an export copies from a checkpoint with those that a process without training writes."""

import json
import tempfile
from pathlib import Path

from crosstrain import Config
from crosstrain.checkpoint.files import Reader
from crosstrain.inference.open_checkpoint import outline
from crosstrain.utils.assets import GENERATION_CONFIG


def strange_files(config: Config, checkpoint: Path) -> dict[str, str]:
    """Return a dict from file names to differences, for a checkpoint's non-tensor files, such as config.json."""
    reader, model = Reader.open(checkpoint), outline(config, checkpoint)
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary)
        model.export.save_config(fresh)
        model.export.save_parts(fresh, reader.names("param"), reader.whole)
        # Skip the generation configuration: the dataset adds its stop tokens to it.
        paths = [path for path in sorted(fresh.iterdir()) if path.name != GENERATION_CONFIG]
        return {path.name: what for path in paths if (what := _difference(checkpoint / path.name, path))}


def _difference(path: Path, expected: Path) -> str | None:
    if not path.exists():
        return "is missing"
    if path.read_bytes() == expected.read_bytes():
        return None
    if path.suffix == ".json":
        mine, theirs = json.loads(path.read_text()), json.loads(expected.read_text())
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                return f"has {key} {json.dumps(mine.get(key))} instead of {json.dumps(theirs.get(key))}"
    return "has other contents"
