"""Export a checkpoint, saved by any runner on any number of ranks, as a plain Hugging Face model folder.

Tensors are copied one at a time from the checkpoint's boxes to the new files. Memory use depends on the
largest tensor, not on the size of the model.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from crosstrain import (
    CheckpointError,
    Group,
    Merge,
    Model,
    Piece,
    Shard,
    UserError,
    explained,
    os_errors_as,
    sentence,
    whole_pieces,
    write_json,
)
from crosstrain.checkpoint import folders
from crosstrain.checkpoint.files import Reader, fsync, write_safetensors
from crosstrain.checkpoint.load_weights import PretrainedWeights, check_frozen, fingerprints
from crosstrain.checkpoint.manifest import STORED_DTYPES, read_json
from crosstrain.modeling.weights import Part
from crosstrain.utils.assets import GENERATION_CONFIG, MODEL_FILES, TOKENIZER_FILES, misnamed
from crosstrain.utils.storage import is_url

from ..prepare.prepare import new_folder

_INDEX = "model.safetensors.index.json"
# Keys that make transformers load code, other weights or other files.
_REDIRECTIONS = {
    "auto_map", "custom_generate", "custom_pipelines", "init_inputs", "use_pretrained_backbone", "assistant_model",
    "quantization_config",
}  # fmt: skip
_ENDS_OF_REDIRECTIONS = ("name_or_path", "_file", "_files")


@dataclass(frozen=True)
class Exported:
    """Summary of an exported folder."""

    parameters: int
    bytes: int  # total size of the tensors
    files: int  # number of files with tensors
    architecture: str | None  # transformers class that loads the folder; None: transformers has no such class


def export(
    checkpoint: Path,
    output: str | Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    progress: Callable[[str], None],
    model: Model | None = None,
    part: Part = (("",), None),
    weights: str | None = None,
    average: int = 1,
) -> Exported:
    """Write the model in a verified `checkpoint` to the folder `output`, which appears only when complete.

    Floating-point tensors are converted to `dtype`, unless it is None. `progress` is called with a line for each file.
    `model` names the sources of the frozen parameters, which the checkpoint does not contain, and the parameters to
    merge into others; None: there are none of either. With a `part` from `Export.parts`, only the tensors of this part
    are written. `weights` is passed to `Reader.open`. `average` is the number of checkpoints whose mean is written.
    Raises UserError if `output` is not empty or cannot be written, and CheckpointError for a malformed checkpoint.
    """
    pretrained = None if model is None else PretrainedWeights.of(model)
    merges = {} if model is None else model.export.merges()
    reader = Reader.open(checkpoint, weights) if average == 1 else _averaged(checkpoint, average, weights)
    with _folder(output) as folder:
        owned, submodel = part
        source = _Parameters(reader, pretrained, merges, owned, owned[0] if submodel is not None else "")
        return _write(source, folder, dtype, max_shard_bytes, progress, submodel)


def export_adapter(
    checkpoint: Path,
    output: str | Path,
    dtype: torch.dtype | None,
    model: Model,
    progress: Callable[[str], None],
    weights: str | None = None,
) -> None:
    """Write the adapter of a verified `checkpoint` of `model` to the folder `output`, in peft's format.

    Raises UserError as `export` does, and also if there is no adapter or if the base weights were trained too.
    """
    reader = Reader.open(checkpoint, weights)
    if model.export.merges().keys() & reader.names("param"):
        raise UserError(
            "--part adapter: the base weights were trained too, so the adapter cannot be used without them; "
            "export the model or part that holds both, which merges the adapter"
        )
    with _folder(output) as folder:
        model.export.save_parts(folder, reader.names("param"), lambda name: reader.whole(name).to(dtype))
        if not any(folder.iterdir()):
            raise UserError(f"--part adapter: {checkpoint} has no adapter")
        for name in reader.files.keys() & TOKENIZER_FILES:
            _copy(reader.folder / name, folder / name, progress)


class _AveragedReader(Reader):
    """The last of several checkpoints, with the mean of their floating-point values (LAWA, Kaddour, 2022)."""

    def __init__(self, readers: list[Reader]) -> None:
        vars(self).update(vars(readers[-1]))
        self._readers = readers

    def fill(self, shards: Iterable[Shard]) -> None:
        """Fill every piece with the mean, which is computed in double precision."""
        for shard in shards:
            for piece in shard.pieces:
                values = []
                for reader in self._readers if piece.data.is_floating_point() else self._readers[-1:]:
                    values.append(torch.empty(piece.data.shape, dtype=torch.float32))
                    reader.fill([replace(shard, pieces=[Piece(piece.box, values[-1])])])
                piece.data.copy_(torch.stack(values).double().mean(0))


def _averaged(checkpoint: Path, count: int, weights: str | None) -> Reader:
    """Open the newest `count` checkpoints of a run up to `checkpoint`. Raises UserError if there are fewer."""
    root = checkpoint.parent
    paths = [folders.step_folder(root, step) for step in folders.steps(root)]
    found = paths[: paths.index(checkpoint) + 1][-count:] if checkpoint in paths else []
    if len(found) < count:
        raise UserError(
            f"--average: {root} has {len(found)} checkpoints up to {checkpoint.name}, not {count}; run.keep_last sets "
            f"how many are kept"
        )
    readers = [Reader.open(folders.verified(path).folder, weights) for path in found]
    if any(reader.names("param") != readers[-1].names("param") for reader in readers):
        raise UserError(f"--average: the last {count} checkpoints in {root} have different parameters")
    return _AveragedReader(readers)


@contextmanager
def _folder(place: str | Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `place` at the end of the block."""
    if isinstance(place, str) and is_url(place):
        raise UserError(f"--output: {place} is a URL; export to a local folder and copy it there")
    output = Path(place)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"--output: {output} already exists and is not an empty folder; choose a different one")
    with os_errors_as(UserError, f"--output: {output} cannot be written"), new_folder(output.absolute()) as made:
        yield made
        for path in (*made.iterdir(), made):
            fsync(path)


@dataclass
class _Parameters:
    """The parameters to export: the ones in the checkpoint, and frozen parameters from pretrained weights."""

    reader: Reader
    pretrained: PretrainedWeights | None
    merges: dict[str, Merge]
    owned: tuple[str, ...]  # prefixes of the names to export
    prefix: str  # prefix that is stripped from the exported names

    def outlines(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Return the dtypes and shapes of all exported parameters, as tensors on the meta device."""
        found = {
            n: (t.shape, STORED_DTYPES[t.dtype]) for (kind, n), t in self.reader.tensors.items() if kind == "param"
        }
        found |= {name: (frozen.shape, torch.float32) for name, frozen in self.reader.frozen.items()}
        merged = {other for merge in self.merges.values() for other in merge.others}
        kept = {name.removeprefix(self.prefix): found[name] for name in found if name.startswith(self.owned)}
        return {
            name: torch.empty(shape, dtype=dtype if dtype and stored.is_floating_point else stored, device="meta")
            for name, (shape, stored) in kept.items()
            if self.prefix + name not in merged
        }

    def read(self, name: str, outline: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Read a parameter into the start of `memory`, with the dtype and shape of `outline`."""
        name = self.prefix + name
        value = memory[: outline.nbytes].view(outline.dtype).view(outline.shape)
        if name in self.merges:
            merge = self.merges[name]
            return value.copy_(merge.combine(*map(self._fp32, (name, *merge.others))))
        if name in self.reader.frozen:
            return value.copy_(self._fp32(name))
        self.reader.fill([Shard("param", name, tuple(value.shape), whole_pieces(value, tuple(value.shape)))])
        return value

    def _fp32(self, name: str) -> torch.Tensor:
        if (frozen := self.reader.frozen.get(name)) is None:
            return self.reader.whole(name)
        assert self.pretrained is not None
        whole = torch.empty(frozen.shape)
        shard = Shard("param", name, tuple(whole.shape), whole_pieces(whole, tuple(whole.shape)))
        self.pretrained.fill([shard])
        check_frozen(self.reader, fingerprints([shard], Group()))
        return whole


def _write(
    source: _Parameters,
    folder: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    progress: Callable[[str], None],
    part: Model | None,
) -> Exported:
    tensors = source.outlines(dtype)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_bytes)
    # The same buffer is used for every tensor.
    memory = torch.empty(max((t.nbytes for t in tensors.values()), default=0), dtype=torch.uint8)
    for file, names in split.filename_to_tensors.items():
        entry = write_safetensors(
            folder / file,
            {name: tensors[name] for name in names},
            produce=lambda name: source.read(name, tensors[name], memory),
        )
        progress(f"{file}  {entry['bytes'] / 1e6:,.1f} MB")
    if split.is_sharded:
        write_json(folder / _INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    contents = {
        name: _copy(source.reader.folder / name, folder / name, progress)
        for name in source.reader.files.keys() & (TOKENIZER_FILES | MODEL_FILES)
    }
    config = contents.get("config.json")
    if part is not None:  # `_copy` has dropped the keys that transformers does not define
        part.export.save_config(folder)
        config = read_json(folder / "config.json")
    if dtype is not None and isinstance(config, dict):
        config.pop("torch_dtype", None)  # the name of this key before transformers 4.56
        config["dtype"] = str(dtype).removeprefix("torch.")
        write_json(folder / "config.json", config)
    return Exported(
        parameters=sum(t.numel() for t in tensors.values()),
        bytes=sum(t.nbytes for t in tensors.values()),
        files=len(split.filename_to_tensors),
        architecture=_architecture(config),
    )


def _copy(path: Path, target: Path, progress: Callable[[str], None]) -> Any:
    """Copy a file if its contents match its name; return the content of a configuration, else None.

    A configuration is written without keys that could make transformers load code, other weights or other files.
    """
    if misnamed(path):
        progress(f"{path.name}: left out, because its contents do not match its name")
        return None
    if not path.name.endswith("config.json"):
        shutil.copyfile(path, target)
        return None
    with explained(f"{path}: not a configuration", CheckpointError):  # the file may be nested too deeply
        given = read_json(path)
        content = _without_redirections(given)
        if path.name in MODEL_FILES and isinstance(content, dict):
            content = _known(content, path.name == GENERATION_CONFIG)
            if left := sorted(given.keys() - content.keys()):
                progress(
                    f"{path.name}: left out keys that are unknown or name code or files: {sentence(', '.join(left))}"
                )
        write_json(target, content)
    return content


def _known(config: dict[str, Any], of_generation: bool) -> dict[str, Any]:
    """Return the safe entries: their keys are defined by transformers, or their values contain no strings."""
    from transformers import GenerationConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    if not of_generation and "model_type" not in config:  # transformers cannot load this model
        return {key: value for key, value in config.items() if key != "architectures"}
    known = {"model_type", "torch_dtype", *GenerationConfig().to_dict()}
    kind = str(config.get("model_type"))
    if not of_generation and kind in CONFIG_MAPPING_NAMES:
        made = CONFIG_MAPPING[kind]
        known |= {field.name for field in fields(made)} | made.attribute_map.keys() | made.sub_configs.keys()
    if _architecture(config) is None:
        known -= {"architectures"}
    return {key: value for key, value in config.items() if key in known or '"' not in json.dumps(value)}


def _without_redirections(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_redirections(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_redirections(item)
        for key, item in value.items()
        if key not in _REDIRECTIONS and not key.endswith(_ENDS_OF_REDIRECTIONS)
    }


def _architecture(config: Any) -> str | None:
    """Return the transformers class that a configuration names; None if it names several, or an unknown one."""
    named = config.get("architectures") if isinstance(config, dict) else None
    first = named[0] if isinstance(named, list) and len(named) == 1 else None
    if not isinstance(first, str):
        return None
    import transformers

    try:
        found = getattr(transformers, first, None)
    except Exception:  # importing the class's module failed
        return None
    return first if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None
