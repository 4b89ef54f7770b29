"""Metrics of a step, rows of metrics.jsonl, and the tags under which all trackers record values and texts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from crosstrain.utils.units import disjoint

Row = dict[str, Any]  # keys: step, names of metrics, timers ({phase: ms}), and the keys that `texts` reads


@dataclass
class StepMetrics:
    """Metrics of one attempted step. None: not finite, or not measured."""

    step: int
    loss: float | None  # mean over target tokens
    lr: float
    grad_norm: float | None  # before clipping
    loss_scale: float
    samples: int  # number of samples consumed so far
    skipped_steps: int
    applied: bool = True  # the weights were updated
    sequence_length: int | None = None  # tokens per sample; None without a curriculum

    # Measured by `Throughput`, over the steps since the last logged step.
    step_ms: float = 0.0
    tokens_per_second: float | None = None  # for language models
    samples_per_second: float | None = None  # for other models
    timers: dict[str, float] = field(default_factory=dict)  # phase -> ms, of this step
    memory: dict[str, float] = field(default_factory=dict)  # memory_allocated_mb and others
    mfu: float | None = None  # model FLOPs utilization
    gpu_utilisation: float | None = None  # percent
    loader_samples_per_second: float | None = None
    recorded: dict[str, float] = field(default_factory=dict)  # from callbacks and the model, since the last logged step
    notes: list[str] = field(default_factory=list)  # about stragglers and slow data loading

    def row(self) -> Row:
        """Return the row for trackers, without the metrics that were not measured."""
        own = {
            name: value
            for name, value in vars(self).items()
            if name in ("loss", "grad_norm") or value not in (None, [])
        }
        del own["memory"], own["recorded"], own["applied"]  # skipped_steps counts steps that were not applied
        return disjoint(disjoint(own, self.memory), self.recorded)

    @property
    def throughput(self) -> str:
        """Tokens or samples per second, with the unit."""
        tokens = self.tokens_per_second
        return f"samples/s {self.samples_per_second or 0:.1f}" if tokens is None else f"tokens/s {tokens:.0f}"


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """Yield the numeric values of a row under tags such as train/loss, val/loss and timers_ms/forward."""
    for key, value in row.items():
        if key == "timers":
            for phase, milliseconds in value.items():
                yield f"timers_ms/{phase}", milliseconds
        elif key != "step" and isinstance(value, int | float):
            group, name = key.split("_", 1) if key.startswith("val_") else ("train", key)
            yield f"{group}/{name}", value


def texts(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the texts of a row: prompts with their completions, under generated/0 and so on, and notes."""
    for number, sample in enumerate(row.get("generated", [])):
        yield f"generated/{number}", sample["prompt"] + sample["text"]
    if row.get("notes"):
        yield "notes", "\n".join(row["notes"])


def flat(config: dict[str, Any]) -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield the values of a configuration under dotted keys such as run.optimizer.name; lists and None become text."""
    for key, value in leaves(config):
        if value != {}:
            yield key, value if isinstance(value, bool | int | float | str) else str(value)


def leaves(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings under dotted keys. An empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
