"""The log lines of a step, in Crosstrain's own format or in Megatron-LM's."""

from datetime import timedelta

from crosstrain.config.run_options import LogOptions
from crosstrain.monitor.metrics import StepMetrics


def log_lines(
    metrics: StepMetrics, max_iters: int, options: LogOptions, targets: str = "tokens", first: bool = False
) -> list[str]:
    """Return the log lines of a step.

    targets: noun for the items over which the loss is averaged. first: True if no step was logged before.
    """
    megatron = options.format == "megatron"
    lines = [_megatron_line(metrics, max_iters, targets) if megatron else _line(metrics, max_iters)]
    if megatron or options.timers:
        lines.append("time (ms) | " + " | ".join(f"{phase}: {ms:.2f}" for phase, ms in metrics.timers.items()))
    if megatron and first:
        memory = (f"{name[len('memory_') : -len('_mb')]}: {mib:.1f}" for name, mib in metrics.memory.items())
        lines.append("memory (MB) | " + " | ".join(memory))
    return lines


def _line(metrics: StepMetrics, max_iters: int) -> str:
    """Example: step  20/400  loss 6.816  lr 7.5e-04  grad_norm 1.22  7,164 tok/s  572 ms  1.1 GB  eta 3:37."""
    tokens, samples = metrics.tokens_per_second, metrics.samples_per_second or 0
    left = str(timedelta(seconds=round((max_iters - metrics.step) * metrics.step_ms / 1000)))
    parts = [
        f"step {metrics.step:{len(str(max_iters))}d}/{max_iters}",
        f"loss {shown(metrics.loss, '.4g' if abs(metrics.loss or 1) < 1 else '.3f')}",
        f"lr {metrics.lr:.1e}",
        f"grad_norm {shown(metrics.grad_norm, '.2f')}",
        f"loss_scale {metrics.loss_scale:g}" if metrics.loss_scale != 1 else "",
        *(f"{name} {value:.4g}" for name, value in metrics.recorded.items()),
        f"skipped {metrics.skipped_steps}" if metrics.skipped_steps else "",
        f"{samples:,.1f} samples/s" if tokens is None else f"{tokens:,.0f} tok/s",
        f"{metrics.step_ms:,.0f} ms",
        f"MFU {100 * metrics.mfu:.1f}%" if metrics.mfu is not None else "",
        f"{metrics.memory['memory_peak_mb'] * 2**20 / 1e9:.1f} GB",
        # 3:37, 2:03:37 or 1 day, 2:03:37
        f"eta {left.removeprefix('0:').removeprefix('0')}" if metrics.step < max_iters else "",
    ]
    return "  ".join(filter(None, parts))


def _megatron_line(metrics: StepMetrics, max_iters: int, targets: str) -> str:
    parts = [
        f"iteration {metrics.step:8d}/{max_iters:8d}",
        f"elapsed time per iteration (ms): {metrics.step_ms:.1f}",
        f"learning rate {metrics.lr:.3E}",
        f"{'lm loss' if targets == 'tokens' else 'loss'} {shown(metrics.loss, '.6E')}",
        f"loss scale {metrics.loss_scale:.1f}",
        f"grad norm {shown(metrics.grad_norm, '.3f')}",
        metrics.throughput,
        *(f"{name} {value:.6g}" for name, value in metrics.recorded.items()),
        f"skipped steps {metrics.skipped_steps}" if metrics.skipped_steps else "",
        f"MFU {100 * metrics.mfu:.1f}%" if metrics.mfu is not None else "",
    ]
    return " | ".join(filter(None, parts))


def shown(value: float | None, form: str) -> str:
    """Format a metric of a step; None stands for a value that is not finite."""
    return "overflow" if value is None else format(value, form)
