"""What a person sees while a run goes: log lines, kept in log.txt too, and a progress bar on a terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class Progress:
    """A bar with loss, tokens/s and time left; silent where stderr is not a terminal, whose log has the lines."""

    def __init__(self, total: int, start: int, enabled: bool) -> None:
        self._bar = tqdm(
            total=total, initial=start, unit="step", dynamic_ncols=True, disable=not (enabled and sys.stderr.isatty())
        )

    def advance(self, row: dict[str, Any]) -> None:
        self._bar.set_postfix_str(
            f"loss {_number(row['loss'], '.4f')}, {row['tokens_per_second']:.0f} tokens/s", refresh=False
        )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def log_line(row: dict[str, Any], max_iters: int) -> list[str]:
    """The two lines of a logged step, in the order and notation of Megatron's log."""
    first = [
        f"iteration {row['step']:8d}/{max_iters:8d}",
        f"elapsed time per iteration (ms): {row['step_ms']:.1f}",
        f"learning rate {row['lr']:.3E}",
        f"lm loss {_number(row['loss'], '.6E')}",
        f"loss scale {row['loss_scale']:.1f}",
        f"grad norm {_number(row['grad_norm'], '.3f')}",
        f"tokens/s {row['tokens_per_second']:.0f}",
    ]
    if row["skipped_steps"]:
        first.append(f"skipped steps {row['skipped_steps']}")
    if "mfu" in row:
        first.append(f"MFU {100 * row['mfu']:.1f}%")
    timers = [f"{phase}: {milliseconds:.2f}" for phase, milliseconds in row["timers"].items()]
    return [" | ".join(first), "time (ms) | " + " | ".join(timers)]


def memory_line(row: dict[str, Any]) -> str:
    """Memory in use after the first interval, in MiB."""
    parts = [
        (name, row[f"memory_{name}_mb"]) for name in ("allocated", "peak", "reserved") if f"memory_{name}_mb" in row
    ]
    return "memory (MB) | " + " | ".join(f"{name}: {value:.1f}" for name, value in parts)


def _number(value: float | None, form: str) -> str:
    return "overflow" if value is None else format(value, form)
