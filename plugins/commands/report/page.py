"""The page of a report: summary, curves, timings, memory, differences, events and texts of one or several runs."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median

from crosstrain import UserError, __version__, os_errors_as, printable, require, write_atomically
from crosstrain.utils.storage import is_url

from ..status.status import find_runs
from .chart import COLOURS, Chart, chart
from .read_run import ReadRun, read_runs

_NATS = "nats per target token"  # unit of the loss of language models
# Key of metrics.jsonl -> title, unit, and whether to draw a moving average over the values.
_CURVES = {
    "loss": ("Training loss", _NATS, True),
    "val_loss": ("Validation loss", _NATS, False),
    "val_perplexity": ("Validation perplexity", "", False),
    "lr": ("Learning rate", "", False),
    "grad_norm": ("Gradient norm", "before clipping", True),
    "tokens_per_second": ("Tokens per second", "all ranks together", True),
    "samples_per_second": ("Samples per second", "all ranks together", True),
    "step_ms": ("Time per step", "ms", True),
    "mfu": ("Model FLOPs utilisation", "share of the peak", True),
    "gpu_utilisation": ("GPU utilisation", "percent, rank 0", True),
    "loader_samples_per_second": ("Data loader", "samples per second, rank 0", True),
    "memory_peak_mb": ("Memory, peak", "MiB, rank 0", False),
    "memory_allocated_mb": ("Memory in use", "MiB, rank 0", False),
    "memory_reserved_mb": ("Memory reserved", "MiB, rank 0", False),
    "loss_scale": ("Loss scale", "", False),
    "skipped_steps": ("Skipped steps", "so far", False),
}
_ONLY_IF_THEY_CHANGE = {"loss_scale", "skipped_steps"}
_EVALUATIONS = 12  # maximum number of evaluations with generated texts on the page
_EVENTS = 200
_NONE = "–"  # noqa: RUF001 - a dash where there is no value

_last = itemgetter(-1)
_Table = dict[str, list[str]]  # title -> one cell for each run
_Texts = tuple[int, list[tuple[str, str]]]  # step, (prompt, generated text) pairs


def report(runs: Sequence[str | Path], output: str | Path = "report.html") -> list[ReadRun]:
    """Write one HTML page about runs, given by their folders or URLs, or by folders that hold runs.

    Returns the runs, with the `problems` found in their files. Raises UserError if there is no run, or if
    `output` cannot be written.
    """
    places: list[str] = []
    for place in map(str, runs):
        places += [place] if is_url(place) else [str(folder) for folder in find_runs([place])] or [place]
    found = read_runs(places)
    with os_errors_as(UserError, f"--output: {output} cannot be written"):
        write_atomically(Path(output), page(found))
    return found


def page(runs: Sequence[ReadRun]) -> str:
    """Render one HTML page that needs no other file. Raises UserError if plotly or jinja2 is missing."""
    jinja2 = require("jinja2", "crosstrain report")
    library = require("plotly.offline", "crosstrain report").get_plotlyjs()
    here = Path(__file__).parent
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    markup = jinja2.utils.markupsafe.Markup
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # Markup stays unchanged
    )
    return environment.get_template("page.html.j2").render(
        version=__version__,
        runs=runs,
        colours=COLOURS,
        style=markup(style),
        scripts=[markup(library), markup(script)],
        # A browser runs only these two scripts and fetches nothing, regardless of the runs' files.
        hashes=[base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (library, script)],
        summary=_summary(runs),
        curves=_curves(runs),
        phases=_phases(runs),
        differences=_differences(runs),
        generated=[_spread(run.generated) for run in runs],
        events=sorted((step, i, what) for i, run in enumerate(runs) for step, what in run.events),
        most_events=_EVENTS,
    )


def _summary(runs: Sequence[ReadRun]) -> _Table:
    table = {
        "steps": [f"{run.last_step:,}" for run in runs],
        "samples": _column(runs, "samples", _last, "{:,.0f}"),
        "last loss": _column(runs, "loss", _last, "{:.4f}"),
        "best validation loss": [_best_validation(run) for run in runs],
        "median tokens/s": _column(runs, "tokens_per_second", median, "{:,.0f}"),
        "median samples/s": _column(runs, "samples_per_second", median, "{:,.1f}"),
        "median ms per step": _column(runs, "step_ms", median, "{:.1f}"),
        "median MFU": _column(runs, "mfu", median, "{:.1%}"),
        "peak memory": _column(runs, "memory_peak_mb", max, "{:,.0f} MiB"),
        "skipped steps": _column(runs, "skipped_steps", _last, "{:,.0f}"),
    }
    return {title: cells for title, cells in table.items() if set(cells) != {_NONE}}


def _column(runs: Sequence[ReadRun], key: str, pick: Callable[[Sequence[float]], float], form: str) -> list[str]:
    return [form.format(pick([*run.curves[key].values()])) if key in run.curves else _NONE for run in runs]


def _best_validation(run: ReadRun) -> str:
    if (curve := run.curves.get("val_loss")) is None:
        return _NONE
    loss, step = min((loss, step) for step, loss in curve.items())
    return f"{loss:.4f} (step {step:,})"


def _curves(runs: Sequence[ReadRun]) -> list[Chart]:
    """Chart the known metrics in the order of `_CURVES`, then all others in order of appearance."""
    hidden = {"samples"}
    for key in _ONLY_IF_THEY_CHANGE:
        if len({value for run in runs for value in run.curves.get(key, {}).values()}) < 2:
            hidden.add(key)
    keys = [key for key in _keys(runs) if key not in hidden and not key.startswith("timers/")]
    of_tokens = any("tokens_per_second" in run.curves for run in runs)
    named = {key: _CURVES.get(key, (key, "", False)) for key in [*_CURVES, *keys] if key in keys}
    return [
        chart(runs, key, title, unit if of_tokens or unit != _NATS else "", smoothed)
        for key, (title, unit, smoothed) in named.items()
    ]


def _phases(runs: Sequence[ReadRun]) -> list[tuple[Chart, list[tuple[str, float]]]]:
    """Return, for each timed phase, a chart and each run's median as text and as a percentage of the longest median."""
    phases = [key for key in _keys(runs) if key.startswith("timers/")]
    medians = {key: [median(run.curves[key].values()) if key in run.curves else None for run in runs] for key in phases}
    longest = max((ms for found in medians.values() for ms in found if ms is not None), default=0) or 1

    def cell(run: ReadRun, key: str, ms: float | None) -> tuple[str, float]:
        if ms is None:
            return _NONE, 0.0
        whole = sum(run.curves["timers/step"].values()) if "timers/step" in run.curves else 0.0
        share = f" ({sum(run.curves[key].values()) / whole:.0%})" if whole > 0 else ""
        return f"{ms:.2f} ms{share}", max(0.0, 100 * (ms / longest))

    rows = []
    for key, found in medians.items():
        cells = [cell(run, key, ms) for run, ms in zip(runs, found, strict=True)]
        rows.append((chart(runs, key, key.removeprefix("timers/"), "ms", smoothed=True), cells))
    return rows


def _keys(runs: Sequence[ReadRun]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.curves))


def _differences(runs: Sequence[ReadRun]) -> _Table:
    keys = dict.fromkeys(key for run in runs for key in run.config)
    cells = {key: [run.config.get(key, _NONE) for run in runs] for key in keys}
    return {key: found for key, found in cells.items() if len(set(found)) > 1}


def _spread(generated: list[_Texts]) -> list[_Texts]:
    """Choose a few evenly spaced evaluations, including the last one."""
    every = -(-len(generated) // _EVALUATIONS) or 1
    return generated[::-every][::-1]
