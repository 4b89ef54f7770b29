"""The report's page: summary, curves, timings, memory, differences, events and texts of one or several runs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from crosstrain import __version__
from crosstrain.report.assets import SCRIPT, STYLE
from crosstrain.report.chart import COLOURS, Series, chart
from crosstrain.report.markup import Html, tag, verbatim
from crosstrain.report.reading import Curve, ReadRun
from crosstrain.report.scale import show

# Key of metrics.jsonl, title, unit, and whether a moving average is drawn over the values.
_CURVES = [
    ("loss", "Training loss", "nats per target token", True),
    ("val_loss", "Validation loss", "nats per target token", False),
    ("val_perplexity", "Validation perplexity", "", False),
    ("lr", "Learning rate", "", False),
    ("grad_norm", "Gradient norm", "before clipping", True),
    ("tokens_per_second", "Tokens per second", "all ranks together", True),
    ("step_ms", "Time per step", "ms", True),
    ("mfu", "Model FLOPs utilisation", "share of the peak", True),
    ("gpu_utilisation", "GPU utilisation", "percent, rank 0", True),
    ("loader_samples_per_second", "Data loader", "samples per second, rank 0", True),
    ("memory_peak_mb", "Memory, peak", "MiB, rank 0", False),
    ("memory_allocated_mb", "Memory in use", "MiB, rank 0", False),
    ("memory_reserved_mb", "Memory reserved", "MiB, rank 0", False),
    ("loss_scale", "Loss scale", "", False),
    ("skipped_steps", "Skipped steps", "so far", False),
]
_NO_CURVE = {"samples"}
_ONLY_IF_THEY_CHANGE = {"loss_scale", "skipped_steps"}
_EVALUATIONS = 12  # of which generated texts are shown, the last one among them
_EVENTS = 200


def page(runs: Sequence[ReadRun]) -> str:
    """One HTML page about these runs, complete in itself."""
    # Whatever came into the page by the runs' files, a browser runs this one script and fetches nothing.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", "Report: " + ", ".join(run.name for run in runs)), verbatim("style", STYLE),
    )  # fmt: skip
    parts = [
        tag("h1", "Training report" if len(runs) == 1 else f"Training report of {len(runs)} runs"),
        tag("div", f"written by crosstrain {__version__}", class_="soft"),
        tag("div", [tag("span", _chip(i), tag("b", run.name)) for i, run in enumerate(runs)], class_="legend"),
        *(tag("div", f"{run.name}: {problem}", class_="problem") for run in runs for problem in run.problems),
        _summary(runs), *_curves(runs), *_timings(runs), *_memory(runs), *_differences(runs), *_events(runs),
        *_generated(runs), *_sources(runs),
    ]  # fmt: skip
    return "<!doctype html>\n" + tag("html", head, tag("body", parts, verbatim("script", SCRIPT)), lang="en") + "\n"


# ---- tables


def _summary(runs: Sequence[ReadRun]) -> Html:
    columns: list[tuple[str, Callable[[ReadRun], str]]] = [
        ("steps", lambda run: f"{run.last_step:,}"),
        ("samples", lambda run: _of(run, "samples", _last, lambda v: f"{v:,.0f}")),
        ("last loss", lambda run: _of(run, "loss", _last, "{:.4f}".format)),
        ("best validation loss", _best_validation),
        ("median tokens/s", lambda run: _of(run, "tokens_per_second", _median, show)),
        ("median ms per step", lambda run: _of(run, "step_ms", _median, "{:.1f}".format)),
        ("median MFU", lambda run: _of(run, "mfu", _median, "{:.1%}".format)),
        ("peak memory", lambda run: _of(run, "memory_peak_mb", max, _mib)),
        ("skipped steps", lambda run: _of(run, "skipped_steps", _last, lambda v: f"{v:,.0f}")),
    ]
    used = [(title, cell) for title, cell in columns if any(cell(run) != _NONE for run in runs)]
    rows = [[_name(i, run), *(tag("td", cell(run)) for _, cell in used)] for i, run in enumerate(runs)]
    return _table(["run", *(title for title, _ in used)], rows, "figures")


def _timings(runs: Sequence[ReadRun]) -> list[Html]:
    phases = _keys(runs, "timers/")
    if not phases:
        return []
    medians = [{phase: _median(run.curves[phase].values) for phase in phases if phase in run.curves} for run in runs]
    longest = max((value for found in medians for value in found.values()), default=0) or 1
    rows = []
    for phase in phases:
        cells = [tag("th", phase.removeprefix("timers/"), class_="wide")]
        for i, (run, found) in enumerate(zip(runs, medians, strict=True)):
            cells.append(_timing(i, found.get(phase), run.curves.get("step_ms"), longest))
        rows.append(cells)
    note = "median of the logged steps, rank 0; the share is of the median time per step"
    charts = [_chart_of(runs, phase, phase.removeprefix("timers/"), "ms", True) for phase in phases]
    return [
        tag("h2", "Time per phase ", tag("span", note, class_="soft")),
        _table(["phase", *(run.name for run in runs)], rows),
        tag("div", filter(None, charts), class_="grid-of small", style="margin-top:14px"),
    ]


def _timing(number: int, value: float | None, step: Curve | None, longest: float) -> Html:
    if value is None:
        return tag("td", _NONE)
    whole = _median(step.values) if step else 0
    share = f" ({value / whole:.0%})" if whole > 0 else ""
    width = f"width:{min(max(100 * value / longest, 0), 100):.1f}%"
    return tag("td", f"{value:.2f} ms{share}", tag("span", class_=f"bar c{number % COLOURS}", style=width))


def _memory(runs: Sequence[ReadRun]) -> list[Html]:
    kinds: list[tuple[str, str, Callable[[Sequence[float]], float]]] = [
        ("memory_peak_mb", "peak", max),
        ("memory_allocated_mb", "in use, last", _last),
        ("memory_allocated_mb", "in use, most", max),
        ("memory_reserved_mb", "reserved, most", max),
    ]
    used = [kind for kind in kinds if any(kind[0] in run.curves for run in runs)]
    rows = [
        [_name(i, run), *(tag("td", _of(run, key, pick, _mib)) for key, _, pick in used)] for i, run in enumerate(runs)
    ]
    if not used:
        return []
    return [
        tag("h2", "Memory ", tag("span", "rank 0", class_="soft")),
        _table(["run", *(k[1] for k in used)], rows, "figures"),
    ]


def _differences(runs: Sequence[ReadRun]) -> list[Html]:
    if len(runs) == 1:
        return []
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
    title = tag("h2", "What the configurations differ in")
    if not differing:
        return [title, tag("p", "nothing", class_="soft")]
    rows = [
        [tag("th", key, class_="wide"), *(tag("td", run.config.get(key, _NONE), class_="wide") for run in runs)]
        for key in differing
    ]
    return [title, _table(["key", *(run.name for run in runs)], rows)]


def _events(runs: Sequence[ReadRun]) -> list[Html]:
    found = [(step, i, what) for i, run in enumerate(runs) for step, what in run.events]
    if not found:
        return []
    rows = [
        [tag("td", f"{step:,}"), _name(i, runs[i]), tag("td", what, class_="wide")]
        for step, i, what in sorted(found)[:_EVENTS]
    ]
    more = f"the first {_EVENTS} of at least {len(found)}" if len(found) > _EVENTS else ""
    return [tag("h2", "Events ", tag("span", more, class_="soft")), _table(["step", "run", "what"], rows)]


def _table(titles: Iterable[str], rows: Iterable[Iterable[Html]], class_: str | None = None) -> Html:
    head = tag("thead", tag("tr", [tag("th", title) for title in titles]))
    return tag(
        "div", tag("table", head, tag("tbody", [tag("tr", cells) for cells in rows]), class_=class_), class_="card"
    )


# ---- curves and texts


def _curves(runs: Sequence[ReadRun]) -> list[Html]:
    named = {key for key, *_ in _CURVES}
    others = [k for k in _keys(runs) if k not in named | _NO_CURVE and not k.startswith("timers/")]
    every = [*_CURVES, *((key, key, "", False) for key in others)]
    charts = [figure for one in every if (figure := _chart_of(runs, *one))]
    return [tag("h2", "Curves"), tag("div", charts, class_="grid-of")] if charts else []


def _chart_of(runs: Sequence[ReadRun], key: str, title: str, unit: str, smoothed: bool) -> Html | None:
    series = [Series(run.name, i, run.curves[key]) for i, run in enumerate(runs) if key in run.curves]
    if key in _ONLY_IF_THEY_CHANGE and len({value for s in series for value in s.curve.values}) < 2:
        return None
    return chart(title, unit, series, smoothed, max(run.last_step for run in runs)) if series else None


def _generated(runs: Sequence[ReadRun]) -> list[Html]:
    parts = []
    for i, run in enumerate(runs):
        every = -(-len(run.generated) // _EVALUATIONS) or 1
        shown = run.generated[::-1][::every][::-1]
        for step, samples in shown:
            texts = [tag("pre", tag("mark", prompt), text) for prompt, text in samples]
            summary = tag("summary", _chip(i), f"{run.name}, step {step:,}")
            parts.append(tag("details", summary, texts, open="" if step == shown[-1][0] else None))
    return [tag("h2", "Generated text"), *parts] if parts else []


def _sources(runs: Sequence[ReadRun]) -> list[Html]:
    parts = [tag("h2", "Configurations and logs")]
    for i, run in enumerate(runs):
        for what, text in (("config.yaml", run.config_text), ("the end of log.txt", run.log_end)):
            if text:
                parts.append(tag("details", tag("summary", _chip(i), f"{run.name}: {what}"), tag("pre", text)))
    return parts


# ---- pieces

_NONE = "–"  # noqa: RUF001 - a dash where there is no value


def _chip(number: int) -> Html:
    return tag("span", class_=f"chip c{number % COLOURS}")


def _name(number: int, run: ReadRun) -> Html:
    return tag("th", _chip(number), run.name)


def _keys(runs: Sequence[ReadRun], prefix: str = "") -> list[str]:
    """Keys of curves in the order in which runs tell them."""
    return list(dict.fromkeys(key for run in runs for key in run.curves if key.startswith(prefix)))


def _of(run: ReadRun, key: str, pick: Callable[[Sequence[float]], float], form: Callable[[float], str]) -> str:
    return form(pick(run.curves[key].values)) if key in run.curves else _NONE


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _median(values: Sequence[float]) -> float:
    return median(values)


def _mib(value: float) -> str:
    return f"{value:,.0f} MiB"


def _best_validation(run: ReadRun) -> str:
    curve = run.curves.get("val_loss")
    if curve is None:
        return _NONE
    loss, step = min(zip(curve.values, curve.steps, strict=True))
    return f"{loss:.4f} (step {step:,})"
