"""LoRA and DoRA: low-rank adapters on linear layers and stacked experts, saved in peft's format."""

import fnmatch
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import MinLen
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from crosstrain import (
    Adapter,
    Around,
    CheckpointError,
    ConfigError,
    DropRate,
    Merge,
    Model,
    OptionError,
    PositiveFloat,
    PositiveInt,
    ReadParameter,
    Source,
    Text,
    check_source,
    find_checkpoint,
    registry,
    require,
    write_json,
)
from crosstrain.checkpoint.files import write_safetensors
from crosstrain.checkpoint.load_weights import PretrainedWeights
from crosstrain.checkpoint.manifest import MANIFEST, read_json

from .stacked import Stacked, StackedLora, matrices_of

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # name of the adapter in peft's modules
_MAGNITUDE = ".lora_magnitude_vector."
_PREFIX = "base_model.model."  # prefix of parameter names in peft's files
# Keys of peft's configuration that may differ from peft's defaults.
_SUPPORTED = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_alpha", "lora_dropout",
    "peft_type", "peft_version", "r", "revision", "target_modules", "target_parameters", "task_type", "use_dora",
}  # fmt: skip
# Values of `init_lora_weights` that leave the base weights unchanged.
_INITIAL = (True, False, None, "gaussian", "orthogonal")


@registry.register_adapter("lora")
class Lora(Adapter):
    """Low-rank adapters (Hu et al., 2021): W x becomes W x + (alpha / rank) B A x, and only A and B are trained."""

    @dataclass
    class Options:
        """If `pretrained` is set, rank, alpha, dora and targets default to the values of the pretrained adapter."""

        rank: PositiveInt | None = None  # rows of A and columns of B; None: as in `pretrained`, else 8
        alpha: PositiveFloat | None = None  # the output is scaled by alpha / rank; None: as in `pretrained`, else 16
        dora: bool | None = None  # DoRA (Liu et al., 2024): also train norms; None: as in `pretrained`, else False
        dropout: DropRate = 0.0  # dropout rate of the adapters' input
        # linear layers or stacked parameters of experts, as names, suffixes of names such as q_proj or
        # experts.down_proj, or patterns; None: as in `pretrained`, else all linear layers in the blocks of the language
        # model
        targets: Annotated[list[Text], MinLen(1)] | None = None
        pretrained: Text | None = None  # adapter to start from: a run, checkpoint or peft folder; None: a new adapter

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.folder = None if options.pretrained is None else adapter_folder(options.pretrained)
        self.settings = options if self.folder is None else _published(options, self.folder)
        self.rank, self.alpha = self.settings.rank or 8, self.settings.alpha or 16.0  # rank and alpha cannot be 0

    def add(self, model: Model) -> None:
        peft = require("peft", "model.adapter")
        self.targets, self.stacks = find_targets(model, self.settings.targets)
        if self.stacks and (self.settings.dora or self.options.dropout):
            raise OptionError("targets", f"{self.stacks[0]}: adapters of experts support neither dora nor dropout")
        maps = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]
        stacked = sum(e.get_parameter(n).numel() for e in model.structure.experts().values() for n in matrices_of(e))
        used = 1.0 - model.structure.idle_parameters / stacked if stacked else 1.0  # fraction of experts per token
        weights = 2.0 * (sum(module.weight.numel() for module in maps) + used * stacked)
        self.config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.options.dropout,  # type: ignore[arg-type]
            use_dora=bool(self.settings.dora),
            init_lora_weights=False,
            target_modules=self.targets,
            target_parameters=self.stacks or None,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in maps),
        )
        if self.targets:
            holder = nn.Module()  # without the model's `config`, peft does not replace linear layers by experts
            holder._modules = model._modules
            peft.inject_adapter_in_model(replace(self.config, target_parameters=None), holder, adapter_name=_NAME)
        idle = 0.0  # elements of adapters that a token does not use
        for name in self.stacks:
            path, _, parameter = name.rpartition(".")
            adapter = StackedLora(model.get_submodule(path), parameter, self.rank, self.alpha)
            model.set_submodule(path, adapter)
            idle += (1.0 - used) * sum(
                p.numel() for p in chain(adapter.lora_A.parameters(), adapter.lora_B.parameters())
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapter(name))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.spared_flops = weights - 6.0 * (trained - idle)
        around: Any = model  # wrap the interfaces of the model
        around.weights = AdaptedWeights(model.weights, self)
        around.structure = AdaptedStructure(model.structure, self)
        around.export = AdaptedExport(model.export, self)


class AdaptedWeights(Around):
    """Weights of a model with adapters."""

    adapter: Lora

    def canonical_name(self, name: str) -> str:
        """Convert peft's name; an adapter of stacked experts keeps `base_layer`, which tells the parameters apart."""
        stacked = is_adapter(name) and ".base_layer." in name
        plain = name if stacked else name.replace(".base_layer", "")
        return self.inner.canonical_name(plain.replace(f".{_NAME}.weight", ".weight"))

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill in peft's initial values: A is drawn as in torch's linear layer, and B is zero (no effect yet)."""
        if not is_adapter(name):
            self.inner.initialize(name, value, rng)
        elif ".lora_B." in name:
            value.zero_()
        elif _MAGNITUDE in name:
            value.copy_(_norms(self._published(name.replace(_MAGNITUDE, ".")), self.adapter.config.fan_in_fan_out))
        else:
            bound = 1 / math.sqrt(value.shape[1])  # kaiming_uniform_ with a = sqrt(5)
            value.uniform_(-bound, bound, generator=rng)

    def _published(self, name: str) -> Tensor:
        """Return a full pretrained weight."""
        for source, reader in PretrainedWeights.of(self.model).parts:
            if source.covers(name):
                place = source.place(name, reader.names("param"))
                assert isinstance(place, str)
                return reader.whole(place)
        raise ConfigError(
            "model.adapter.dora: DoRA starts from the norms of pretrained weights, so it needs a model with such "
            "weights"
        )

    def sources(self) -> list[Source]:
        """Return the model's weight sources, restricted to base weights, and the source of the pretrained adapter."""
        base = [
            replace(source, covers=lambda name, covers=source.covers: not is_adapter(name) and covers(name))
            for source in self.inner.sources()
        ]
        folder = self.adapter.folder
        return base if folder is None else [*base, Source(folder, _peft_name, is_adapter)]


class AdaptedStructure(Around):
    """Structure of a model with adapters."""

    adapter: Lora

    @property
    def reads_across(self) -> bool:
        return bool(self.adapter.settings.dora) or any(isinstance(m, Stacked) for m in self.model.modules())

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Shard B of column-parallel layers by output features, and A of row-parallel layers by input features."""
        if self.adapter.settings.dora:
            return {}
        plan = self.inner.tensor_parallel_plan()
        modules = {name.rpartition(".")[0] for name in self.model.weights.parameters()}
        sides = {"column": "lora_B", "fused_qkv": "lora_B", "row": "lora_A"}
        patterns = {f"{key}.{sides[style]}": style for key, style in plan.items() if style in sides}
        return plan | {key: style for key, style in patterns.items() if fnmatch.filter(modules, key)}

    def flops_per_token(self, sequence_length: int | None) -> float | None:
        """Return the model's FLOPs per token, excluding the gradients of frozen weights."""
        flops = self.inner.flops_per_token(sequence_length)
        return None if flops is None else flops - self.adapter.spared_flops


class AdaptedExport(Around):
    """Export of a model with adapters."""

    adapter: Lora

    def merges(self) -> dict[str, Merge]:
        """Return the model's merges, and a merge of each adapter into the weight of its linear layer."""
        found = self.inner.merges()
        for name, module in self.model.named_modules():
            if isinstance(module, StackedLora):
                weight = self.model.weights.canonical_name(f"{name}.base_layer.{module.parameter}")
                others = tuple(
                    self.model.weights.canonical_name(f"{name}.{side}.{_NAME}.weight") for side in ("lora_A", "lora_B")
                )
                found[weight] = Merge(others, module.merged)
            elif hasattr(module, "lora_A"):
                weight = self.model.weights.canonical_name(f"{name}.base_layer.weight")
                stem = weight.removesuffix("weight")
                combine = partial(
                    merged,
                    scale=self.adapter.alpha / self.adapter.rank,
                    transposed=self.adapter.config.fan_in_fan_out,
                )
                parts = ("lora_A", "lora_B", "lora_magnitude_vector")[: 3 if self.adapter.settings.dora else 2]
                found[weight] = Merge(tuple(f"{stem}{part}.weight" for part in parts), combine)
        return found

    def save_parts(self, folder: Path, names: set[str], read: ReadParameter) -> None:
        """Write the adapter in peft's format; `PeftModel.from_pretrained` opens the folder."""
        base = self.model.weights.folder()
        settings = {
            "base_model_name_or_path": base and str(base),
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "init_lora_weights": True,
            "target_modules": [self.model.weights.canonical_name(name) for name in self.adapter.targets],
            "target_parameters": [self.model.weights.canonical_name(name) for name in self.adapter.stacks] or None,
        }
        config = self.adapter.config.to_dict() | settings
        # peft turns lists into sets for models with renamed weights, such as mixtures of experts.
        write_json(folder / _CONFIG, {key: sorted(v) if isinstance(v, set) else v for key, v in config.items()})
        tensors = {_saved_name(name): read(name) for name in sorted(names) if is_adapter(name)}
        write_safetensors(folder / _WEIGHTS, tensors)


def _peft_name(name: str, available: set[str]) -> str:
    """Return a parameter's name in a peft file or a checkpoint; a larger model may have added a prefix to the name."""
    return next((key for key in available if f".{key}".endswith(f".{name}")), _saved_name(name))


def _saved_name(name: str) -> str:
    """Return a parameter's name in peft's files."""
    return _PREFIX + name.replace(f"{_MAGNITUDE}weight", _MAGNITUDE[:-1])


def _norms(weight: Tensor, transposed: bool) -> Tensor:
    """Return each output feature's weight norm, [out]."""
    return torch.linalg.norm(weight.T if transposed else weight, dim=1)


def find_targets(model: Model, targets: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the names of the linear layers and of the experts' stacked parameters that match `targets`.

    A target is a full name, or a suffix that begins after a dot, and may have wildcards. Only a target that contains
    `experts` can match stacked parameters. None: all linear layers in the blocks of the language model. Raises
    OptionError for a target without a match.
    """
    blocks = model.blocks() if targets else model.structure.decoder_blocks()
    inside = {id(module) for block in blocks for module in block.modules()}
    layers = [
        n for n, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)) and id(module) in inside
    ]
    if targets is None:
        return layers, []
    stacks = [f"{path}.{name}" for path, e in model.structure.experts().items() for name in matrices_of(e)]
    matches = {
        target: [n for n in layers + stacks * ("experts" in target) if fnmatch.fnmatchcase(f".{n}", f"*.{target}")]
        for target in targets
    }
    if missing := [target for target, names in matches.items() if not names]:
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in (*layers, *stacks)}))
        raise OptionError(
            "targets",
            f"{missing[0]!r} is not a linear layer of the blocks or a stack of experts; they have {ends or 'none'}",
        )
    found = set(chain.from_iterable(matches.values()))
    return [name for name in layers if name in found], [name for name in stacks if name in found]


def adapter_folder(source: str) -> Path:
    """Return the folder with an adapter's weights; `source` is a run, a checkpoint or a peft folder.

    Raises CheckpointError if there is no adapter, and ConfigError if the configuration is not trusted to use `source`.
    """
    check_source(f"the adapter {source}")
    path = Path(source).expanduser()
    folder = path if (path / _WEIGHTS).is_file() and not (path / MANIFEST).exists() else find_checkpoint(path)
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{folder}: expected an adapter, but there is no {_CONFIG}")
    return folder


def _published(options: Lora.Options, folder: Path) -> Lora.Options:
    """Return the options, completed with the settings of the adapter in `folder`.

    Raises OptionError if a given option contradicts the adapter, and CheckpointError if the adapter is not supported.
    """
    config = read_json(folder / _CONFIG, most_bytes=1 << 24)
    match config:
        case {
            "peft_type": "LORA",
            "r": int(rank),
            "lora_alpha": int() | float() as alpha,
            "target_modules": list(targets),
        } if (
            type(rank) is int
            and rank >= 1
            and 0 < alpha < math.inf
            and all(isinstance(target, str) for target in targets)
        ):
            pass
        case _:
            raise CheckpointError(
                f"{folder / _CONFIG}: expected the configuration of a LoRA adapter on named linear layers"
            )
    usual = require("peft", "model.adapter").LoraConfig().to_dict() | {"init_lora_weights": None}
    config["init_lora_weights"] = None if (start := config.get("init_lora_weights")) in _INITIAL else start
    if others := [key for key, value in config.items() if value and value != usual.get(key) and key not in _SUPPORTED]:
        raise CheckpointError(f"{folder / _CONFIG}: adapters with {others[0]} are not supported")
    targets = targets + [t if "experts" in t else f"experts.{t}" for t in config.get("target_parameters") or []]
    theirs = {"rank": rank, "alpha": float(alpha), "targets": targets, "dora": bool(config.get("use_dora"))}
    for key, value in theirs.items():
        if (given := getattr(options, key)) not in (None, value):
            raise OptionError(key, f"expected {value}, as in {folder}, got {given}; leave this option out")
    return replace(options, **theirs)


def is_adapter(name: str) -> bool:
    """Return True for the name of an adapter's parameter."""
    return ".lora_A." in name or ".lora_B." in name or _MAGNITUDE in name


def merged(
    weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None = None, *, scale: float, transposed: bool
) -> Tensor:
    """Merge an adapter into a linear layer's weight [out, in], or [in, out] if `transposed`.

    a: [rank, in]; b: [out, rank]; magnitude: DoRA's norms [out].
    """
    change = (b @ a) * scale
    weight = weight + (change.T if transposed else change)
    if magnitude is None:
        return weight
    factors = magnitude / _norms(weight, transposed)
    return weight * (factors if transposed else factors[:, None])
