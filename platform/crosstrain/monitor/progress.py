"""Lines of the log in Megatron's notation, and the progress bar."""

from __future__ import annotations

import sys

from tqdm import tqdm

from crosstrain.monitor.metrics import StepMetrics


class Progress:
    """A bar with loss, tokens/s and time left; silent where stderr is not a terminal."""

    def __init__(self, total: int, start: int, enabled: bool) -> None:
        self._bar = tqdm(
            total=total, initial=start, unit="step", dynamic_ncols=True, disable=not (enabled and sys.stderr.isatty())
        )

    def advance(self, metrics: StepMetrics) -> None:
        self._bar.set_postfix_str(
            f"loss {_number(metrics.loss, '.4f')}, {metrics.tokens_per_second:.0f} tokens/s", refresh=False
        )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def log_line(metrics: StepMetrics, max_iters: int) -> list[str]:
    """Return the two lines of a logged step, in the order and notation of Megatron's log."""
    first = [
        f"iteration {metrics.step:8d}/{max_iters:8d}",
        f"elapsed time per iteration (ms): {metrics.step_ms:.1f}",
        f"learning rate {metrics.lr:.3E}",
        f"lm loss {_number(metrics.loss, '.6E')}",
        f"loss scale {metrics.loss_scale:.1f}",
        f"grad norm {_number(metrics.grad_norm, '.3f')}",
        f"tokens/s {metrics.tokens_per_second:.0f}",
    ]
    if metrics.skipped_steps:
        first.append(f"skipped steps {metrics.skipped_steps}")
    if metrics.mfu is not None:
        first.append(f"MFU {100 * metrics.mfu:.1f}%")
    timers = [f"{phase}: {milliseconds:.2f}" for phase, milliseconds in metrics.timers.items()]
    return [" | ".join(first), "time (ms) | " + " | ".join(timers)]


def memory_line(metrics: StepMetrics) -> str:
    """Return the line about memory in use, in MiB."""
    parts = [f"{name[len('memory_') : -len('_mb')]}: {value:.1f}" for name, value in metrics.memory.items()]
    return "memory (MB) | " + " | ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "overflow" if value is None else format(value, form)
