"""The home that tests of the configuration share: components of every kind, presets and a project file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from crosstrain.config.load import Config, load_config
from crosstrain.config.run_options import (
    AmpOptions,
    BadStepOptions,
    BatchWarmupOptions,
    BitwiseOptions,
    CurriculumOptions,
    LogOptions,
    ProfileOptions,
    RunOptions,
)
from crosstrain.utils.errors import ConfigError
from fixtures_plugins import isolate, write

PLUGINS = '''
from __future__ import annotations
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from crosstrain.config.schema import Component, OptionError
from crosstrain.config.registry import registry

@registry.register_model("net")
class Net:
    @dataclass
    class Options:
        width: int
        depth: int = 2
        dropout: float = 0.0
        activation: Literal["gelu", "relu"] = "gelu"
        plan: dict[str, str] = field(default_factory=lambda: {"qkv": "column"})

        def __post_init__(self):
            if self.width % self.depth:
                raise OptionError("width", f"{self.width} is not a multiple of depth, {self.depth}")

@registry.register_model("other_net")
class OtherNet:
    @dataclass
    class Options:
        layers: int = 1

@dataclass
class Prepare:
    input: str
    vocabulary: int | None = None

@registry.register_dataset("lines")
class Lines:
    @dataclass
    class Options:
        path: Path
        seq_length: int = 16
        split: tuple[int, int, int] = (8, 1, 1)
        tags: list[str] = field(default_factory=list)
        weights: dict[str, float] = field(default_factory=dict)
        prepare: Prepare | None = None
        resize: Annotated[Component, "processor"] = field(default_factory=lambda: Component("crop"))

@registry.register_dataset("images")
class Images:
    @dataclass
    class Options:
        folder: str = "."

@registry.register_processor("crop")
class Crop:
    @dataclass
    class Options:
        size: int = 4

@registry.register_processor("pad")
class Pad:
    @dataclass
    class Options:
        value: float | None = None

@registry.register_runner("ddp")
class DDP:
    """No options."""

@registry.register_runner("shard")
class Shard:
    @dataclass
    class Options:
        stage: Literal[1, 2, 3] = 1
        offload: bool = False
        bucket: int | str = "auto"

        def __post_init__(self):
            if self.offload and self.stage == 1:
                raise ValueError("offload needs stage 2 or 3")

@registry.register_optimizer("adamw")
class AdamW:
    @dataclass
    class Options:
        betas: tuple[float, float] = (0.9, 0.999)
        eps: float = 1e-8

@registry.register_optimizer("sgd")
class SGD:
    @dataclass
    class Options:
        momentum: float = 0.0

@registry.register_lr_scheduler("cosine")
def cosine(step):
    return 1.0

@registry.register_lr_scheduler("linear")
def linear(step):
    return 1.0

@registry.register_tracker("jsonl")
class Jsonl:
    """No options."""

@registry.register_tracker("tensorboard")
class TensorBoard:
    """No options."""

@registry.register_tracker("board")
class Board:
    @dataclass
    class Options:
        project: str
        tags: list[str] = field(default_factory=list)
'''

HOME = {
    "plugins/all.py": PLUGINS,
    "configs/models/net/small.yaml": "width: 8\n",
    "configs/models/net/large.yaml": "width: 64\ndepth: 4\n",
    "configs/runners/shard2.yaml": "# a preset\nname: shard\nstage: 2\n",
    "configs/runners/shard2_offload.yaml": "name: shard2\noffload: true\n",
    "configs/runners/ddp.yaml": "name: ddp\n",
    "configs/datasets/books.yaml": "name: lines\npath: data/books\nseq_length: 128\n",
}

PROJECT = """\
model:
  arch: net
  model_type: small
  dropout: 0.1
datasets:
  webtext:
    name: lines
    path: data/webtext
    split: [949, 50, 1]
    prepare: {input: stdlib}
run:
  runner: {name: shard, stage: 2}
  output_dir: output/x
  max_iters: 320000
  global_batch_size: 8
  micro_batch_size: 4
  optimizer:
    name: adamw
    betas: [0.9, 0.95]
  init_lr: 1.5e-4
  lr_sched: cosine
  warmup_fraction: 0.01
  amp: fp16
  gradient_checkpointing: full
"""


def configured_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Path]:
    """Body of a fixture: `folder` is home, with the files above."""
    yield from isolate(monkeypatch, write(folder, {**HOME, "p.yaml": PROJECT}))


def load(*options: str) -> Config:
    return load_config("p.yaml", options)


def edit(home: Path, old: str, new: str) -> None:
    """Write the project file with one change."""
    assert PROJECT.count(old) == 1, old
    (home / "p.yaml").write_text(PROJECT.replace(old, new), encoding="utf-8")


def mistakes(*options: str, path: str = "p.yaml") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, options)
    assert str(caught.value) == "\n".join(caught.value.sentences)
    return caught.value.sentences


def mistake(*options: str, path: str = "p.yaml") -> str:
    (only,) = mistakes(*options, path=path)
    assert "\n" not in only
    return only


PAGE = ROOT / "docs" / "configuration.md"


TABLES = {
    "## Every key of `run`": RunOptions,
    "`amp` as a mapping:": AmpOptions,
    "### Bad steps": RunOptions,
    "`on_bad_step` as a mapping:": BadStepOptions,
    "### Reporting, in steps": RunOptions,
    "`log` as a mapping:": LogOptions,
    "`profile` as a mapping:": ProfileOptions,
    "`bitwise` as a mapping:": BitwiseOptions,
    "`curriculum` as a mapping:": CurriculumOptions,
    "`batch_warmup` as a mapping:": BatchWarmupOptions,
    "### Length": RunOptions,
    "### Checkpoints": RunOptions,
    "`runner: ddp`": ("runner", "ddp"),
    "`runner: fsdp`": ("runner", "fsdp"),
    "`runner: diloco`": ("runner", "diloco"),
    "`optimizer: adamw`": ("optimizer", "adamw"),
    "`optimizer: sgd`": ("optimizer", "sgd"),
    "`optimizer: muon`": ("optimizer", "muon"),
    "`adapter: lora`": ("adapter", "lora"),
    "`objective: dpo`": ("objective", "dpo"),
    "`objective: orpo`": ("objective", "orpo"),
    "`objective: kto`": ("objective", "kto"),
    "`objective: grpo`": ("objective", "grpo"),
    "`objective: distill`": ("objective", "distill"),
    "`objective: reward_model`": ("objective", "reward_model"),
    "`objective: info_nce`": ("objective", "info_nce"),
    "`name: text`": ("dataset", "text"),
    "`name: chat`": ("dataset", "chat"),
    "`name: preference`": ("dataset", "preference"),
}


def rows() -> list[tuple[Any, str, str, str]]:
    """(table, key, type, default) of every row of the tables above."""
    table, found = None, []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        table = next((t for start, t in TABLES.items() if line.startswith(start)), None if line[:3] == "## " else table)
        cells = [cell.strip() for cell in line.split(" | ")]
        if table is not None and line.startswith("| `"):
            for key in re.findall(r"`(\w+)`", cells[0]):
                found.append((table, key, cells[1], cells[2].rstrip(" |")))
    return found


ROWS = rows()
