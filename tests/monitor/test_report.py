"""`crosstrain report`: a page about runs that may be anybody's, half written or damaged."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from crosstrain_plugins.builtin.commands.report.chart import downsample, smooth
from crosstrain_plugins.builtin.commands.report.page import page
from crosstrain_plugins.builtin.commands.report.read_run import read_runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

from conftest import ENVIRONMENT, ROOT, Workspace
from crosstrain.cli.main import main
from crosstrain.utils.errors import UserError

PLOTLY = get_plotlyjs()
FOLDER = ROOT / "plugins" / "commands" / "report"
SCRIPT = (FOLDER / "page.js").read_text()
CHROMIUM = Path("/usr/bin/chromium")
ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "script", "h1", "h2", "p", "b", "div", "span", "table", "thead",
    "tbody", "tr", "th", "td", "figure", "figcaption", "details", "summary", "pre", "mark",
}  # fmt: skip


class Outline(HTMLParser):
    """Elements, attributes and text of a page; fails where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.attributes: set[str] = set()
        self.figures: dict[str | None, dict[str, Any]] = {}  # by title
        self.policy = ""
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        given = dict(attrs)
        self.attributes |= set(given)
        if figure := given.get("data-figure"):
            self.figures[given["aria-label"]] = json.loads(figure, parse_constant=fail)
        self.policy = (given["content"] or "") if given.get("http-equiv") == "Content-Security-Policy" else self.policy
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not (self.open and self.open[-1] == "style"):
            self.text.append(data)


def fail(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON, and a browser would draw nothing")


def check_harmless(text: str) -> Outline:
    """The page is well formed, runs plotly.js and our own script alone, refers to nothing and can be encoded."""
    text.encode("utf-8")
    assert text.count(PLOTLY) == 1
    outline = Outline(text.replace(PLOTLY, "plotly"))
    assert set(outline.elements) <= ELEMENTS
    assert outline.scripts == ["plotly", SCRIPT]
    assert not [name for name in outline.attributes if name.startswith("on") or name in ("href", "src", "srcdoc")]
    hashes = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (PLOTLY, SCRIPT))
    scripts = " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert outline.policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {scripts}"
    return outline


def write_run(folder: Path, rows: Sequence[Any], config: object = None, log: str = "started\n", raw: str = "") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + raw, encoding="utf-8", errors="surrogatepass")
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"run": {"seed": 1}}), encoding="utf-8")
    (folder / "log.txt").write_text(log, encoding="utf-8", errors="surrogatepass")
    return str(folder)


def rows(steps: int, every: int = 1, **more: Any) -> list[dict[str, Any]]:
    rng = random.Random(steps)
    return [
        {
            "step": s,
            "loss": 3 + 5 * math.exp(-s / steps) + rng.random() / 10,
            "lr": 1e-3 * (1 - s / steps),
            "grad_norm": 1 + rng.random(),
            "loss_scale": 1.0,
            "samples": 8 * s,
            "skipped_steps": 0,
            "step_ms": 50.0,
            "tokens_per_second": 6000.0,
            "timers": {"forward": 20 + rng.random(), "data loader": 1.0},
            "memory_peak_mb": 900.0,
            "memory_allocated_mb": 800.0,
            **more,
        }
        for s in range(every, steps + 1, every)
    ]


def test_runs_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = {"seed": 1, "runner": {"name": "ddp"}}
    first = rows(40)
    first[-1] |= {"val_loss": 2.5, "val_perplexity": 12.2, "generated": [{"prompt": "def ", "text": "f(x):"}]}
    a = write_run(tmp_path / "first", first, {"run": shared | {"init_lr": 0.001, "amp": None}})
    b = write_run(tmp_path / "second", rows(20, every=2, mfu=0.5), {"run": shared | {"init_lr": 0.002, "amp": "bf16"}})
    output = tmp_path / "page.html"
    assert main(["report", a, b, "--output", str(output)]) == 0
    assert "2 run(s)" in capsys.readouterr().out
    outline = check_harmless(output.read_text())
    told = "\n".join(outline.text)
    for expected in (
        "Training report of 2 runs",
        "Training loss",
        "Validation loss",
        "median MFU",
        "50.0%",
        "2.5000",
        "Time per phase",
        "forward",
        "900 MiB",
        "What the configurations differ in",
        "run.init_lr",
        "0.002",
        "Generated text",
        "f(x):",
        "config.yaml",
    ):
        assert expected in told, expected
    differing = told.split("What the configurations differ in")[1].split("Generated text")[0]
    assert "run.amp\nnull\nbf16" in differing
    assert "run.seed" not in differing
    assert "could not be read" not in told
    # Each run's curve of the loss, as far as it goes, in the run's colour.
    one, two = outline.figures["Training loss"]["data"]
    assert (one["name"], one["x"], one["y"]) == ("first", list(range(1, 41)), [short(row["loss"]) for row in first])
    assert (two["name"], two["x"]) == ("second", list(range(2, 21, 2)))
    assert one["line"]["color"] != two["line"]["color"]


def short(value: float) -> float:
    return float(f"{value:.6g}")


def test_shares_of_phases_that_take_turns_add_up_to_the_whole(tmp_path: Path) -> None:
    turns = [{"a": 50, "b": 50, "c": 0}, {"a": 50, "b": 0, "c": 50}, {"a": 0, "b": 50, "c": 50}]
    # The steps that were not logged are faster here: phases are shares of the logged ones.
    steps = [{"step": 10 * s, "step_ms": 20, "timers": t | {"step": 100}} for s, t in enumerate(turns, 1)]
    run = write_run(tmp_path / "run", steps)
    assert page(read_runs([run])).count("50.00 ms (33%)") == 3  # the medians alone would say 50 % of each


def test_noisy_and_steep_curves_can_be_read(tmp_path: Path) -> None:
    noisy = [
        row | {"grad_norm": 60.0 if row["step"] == 500 else 1 + row["step"] % 7, "lr": 0.99 ** row["step"]}
        for row in rows(1000)
    ]
    figures = check_harmless(page(read_runs([write_run(tmp_path / "run", noisy)]))).figures
    values, average = figures["Training loss"]["data"]
    assert values["opacity"] < 1
    assert "opacity" not in average
    assert average["y"][200] == pytest.approx(values["y"][200], abs=0.2)
    assert len(figures["Learning rate"]["data"]) == 1
    assert figures["Learning rate"]["layout"]["yaxis"]["type"] == "log"
    assert max(figures["Gradient norm"]["data"][0]["y"]) == 60  # the shortest spike is in the data


def test_a_damaged_file_gives_what_can_be_read_and_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "cut", rows(10), raw='{"step": 11, "loss": 2.')
    (run,) = read_runs([folder])
    assert (len(run.curves["loss"]), run.last_step) == (10, 10)
    assert run.problems == [
        "cut: metrics.jsonl: the last line could not be read (the run was killed or is still writing); "
        "the rest is shown"
    ]
    bad = [
        "not json",
        "[1]",
        '{"step": "7"}',
        '{"step": -1}',
        '{"step": 1e999}',
        "[" * 100_000,
        '{"step":1' + " " * (1 << 21),
    ]
    folder = write_run(tmp_path / "bad", [], raw="\n".join([*bad, json.dumps({"step": 5, "loss": 1.5}), "\0\0"]))
    (run,) = read_runs([folder])
    assert list(run.curves["loss"].values()) == [1.5]
    assert "lines, the first being line 1," in run.problems[0]
    check_harmless(page([run]))


def test_values_that_are_no_numbers_are_passed_over(tmp_path: Path) -> None:
    strange = {"loss": None, "lr": True, "grad_norm": "2", "step_ms": float("inf"), "mfu": float("nan"), "big": 10**400}
    (run,) = read_runs([write_run(tmp_path / "run", [{"step": 1, "tokens_per_second": 3, **strange}])])
    assert {key: list(curve.values()) for key, curve in run.curves.items()} == {"tokens_per_second": [3.0]}
    assert run.events == [(1, "the loss was not finite")]
    check_harmless(page([run]))


def test_steps_that_stand_twice_count_once(tmp_path: Path) -> None:
    again = [{"step": s, "loss": float(v)} for v, s in enumerate([1, 2, 3, 2, 3, 4])]
    (run,) = read_runs([write_run(tmp_path / "run", again)])
    assert list(run.curves["loss"]) == [1, 2, 3, 4]
    assert list(run.curves["loss"].values()) == [0.0, 3.0, 4.0, 5.0]
    assert "the later row is used" in run.problems[0]


def test_events_are_told(tmp_path: Path) -> None:
    told = rows(4)
    told[1] |= {"loss": None, "skipped_steps": 2, "loss_scale": 0.5}
    told[2] |= {"skipped_steps": 2, "loss_scale": 0.5, "notes": ["rank 1 is a straggler"]}
    told[3] |= {"skipped_steps": 2, "loss_scale": 0.5}
    (run,) = read_runs([write_run(tmp_path / "run", told)])
    assert run.events == [
        (2, "the loss was not finite"),
        (3, "rank 1 is a straggler"),
    ]


def test_a_run_with_nothing_but_a_metrics_file_is_shown(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text("")
    (run,) = read_runs([str(tmp_path / "bare")])
    assert len(run.problems) == 2
    check_harmless(page([run]))


LAUGHS = "a0: &a0 [1, 2]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))


@pytest.mark.parametrize("bomb", [LAUGHS, "[" * 5000, "a: !!python/object/apply:os.getcwd []"])
def test_a_configuration_that_is_a_bomb_is_a_note(tmp_path: Path, bomb: str) -> None:
    folder = write_run(tmp_path / "run", rows(2))
    (tmp_path / "run" / "config.yaml").write_text(bomb)
    (run,) = read_runs([folder])
    assert run.config == {}
    assert "config.yaml could not be read" in run.problems[0]
    check_harmless(page([run]))


def test_what_is_no_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "no metrics.jsonl found" in capsys.readouterr().err
    folder = write_run(tmp_path / "run", rows(2))
    (tmp_path / "bare").mkdir()
    assert main(["report", folder, str(tmp_path / "bare"), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.startswith("note: left out: ")
    write_run(tmp_path / "other", rows(2))
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0  # those below it
    assert "2 run(s)" in capsys.readouterr().out
    assert main(["report", folder, "--output", str(tmp_path / "no" / "page.html")]) == 1
    assert capsys.readouterr().err.startswith("error: --output:")
    assert main(["report", folder, "--output", str(tmp_path)]) == 1


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / place / "out", rows(2)) for place in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/out", "b/out"]
    assert [run.name for run in read_runs([folders[0], folders[0]])] == ["out (1)", "out (2)"]


HOSTILE = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "</script><script>alert(1)</script>",
            '"><img src=x onerror=alert(1)>',
            "' onload='alert(1)",
            "<!--",
            "]]>",
            "</style><svg onload=alert(1)>",
            "&lt;script&gt;",
            "{{7*7}}",
            "\x1b[31m",
            "\u202eevil",
            "\ud800",
            "</pre>",
            "javascript:alert(1)",
            "\x00",
            "<a href=//evil>",
        ]
    ),
)
NUMBER = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), HOSTILE)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    table=st.lists(st.dictionaries(HOSTILE, NUMBER, max_size=4), max_size=4),
    timers=st.dictionaries(HOSTILE, NUMBER, max_size=3),
    config=st.dictionaries(HOSTILE, st.one_of(HOSTILE, st.lists(HOSTILE, max_size=2)), max_size=3),
    words=st.lists(HOSTILE, min_size=3, max_size=3),
)
def test_nothing_in_a_runs_files_becomes_markup(
    tmp_path: Path, table: list[Any], timers: dict[str, Any], config: dict[str, Any], words: list[str]
) -> None:
    told = [row | {"step": i, "timers": timers} for i, row in enumerate(table)]
    told.append({"step": 9, "loss": 1, "notes": words, "generated": [{"prompt": words[0], "text": words[1]}]})
    runs = read_runs([write_run(tmp_path / "a <b>", told), write_run(tmp_path / "c", rows(3))])
    runs[0].config = {str(key): str(value) for key, value in config.items()}  # as no YAML file of ours would hold
    runs[0].config_text = runs[0].log_end = runs[0].name = words[2]
    outline = check_harmless(page(runs))
    if (visible := words[0].strip()).isascii() and visible.isprintable():
        assert visible in "".join(outline.text)


def test_our_own_style_and_scripts_stand_as_they_are() -> None:
    style = (FOLDER / "page.css").read_text()
    assert "</" not in style + SCRIPT
    assert "http" not in style + SCRIPT
    assert "innerHTML" not in SCRIPT
    assert not re.search("</script|<!--", PLOTLY, re.IGNORECASE)


def test_names_in_a_chart_are_no_markup_of_plotlys(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>&amp;", rows(3))
    (trace,) = check_harmless(page(read_runs([folder]))).figures["Training loss"]["data"]
    assert trace["name"] == "&lt;b&gt;&amp;amp;"


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    runs = read_runs([write_run(tmp_path / "run", rows(3))])
    with pytest.raises(UserError, match=rf"{package}, which is not installed; run: pip install 'crosstrain\[report\]'"):
        page(runs)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=2000), st.integers(1, 40), st.integers(1, 9))
def test_downsampling_keeps_ends_and_extremes(values: list[float], buckets: int, every: int) -> None:
    steps = list(range(7, 7 + every * len(values), every))
    points = downsample(steps, values, buckets)
    assert len(points) <= max(2 * buckets + 2, 2)
    assert points[0] == (steps[0], values[0])
    assert points[-1] == (steps[-1], values[-1])
    assert {min(values), max(values)} <= {value for _, value in points}
    assert set(points) <= set(zip(steps, values, strict=True))
    assert [step for step, _ in points] == sorted({step for step, _ in points})


def test_the_average_does_not_lag() -> None:
    line = [2.0 * i for i in range(50)]
    assert smooth(line, 5)[5:-5] == pytest.approx(line[5:-5])
    assert smooth([1.0], 3) == [1.0]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=200))
def test_any_values_can_be_drawn(tmp_path: Path, values: list[float]) -> None:
    told = [{"step": i, "loss": v, "step_ms": v, "timers": {"forward": v}} for i, v in enumerate(values)]
    figures = check_harmless(page(read_runs([write_run(tmp_path / "run", told)]))).figures
    assert set(figures) == {"Training loss", "Time per step", "forward"}


def test_reporting_needs_nothing_heavy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows(3))
    program = (
        "import sys; from crosstrain.cli.main import main; "
        f"assert main(['report', {folder!r}, '--output', {str(tmp_path / 'p.html')!r}]) == 0; "
        "assert not {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=60)


@pytest.mark.slow
def test_a_hundred_thousand_rows_are_a_small_page(tmp_path: Path) -> None:
    long, short_run = (write_run(tmp_path / str(n), rows(n)) for n in (100_000, 1000))
    text = page(read_runs([long]))
    check_harmless(text)
    own = len(text) - len(PLOTLY)
    assert own < 500_000
    # What is beyond two points a bucket costs nothing.
    assert own < 1.3 * (len(page(read_runs([short_run]))) - len(PLOTLY))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("playwright") is None or not CHROMIUM.exists(),
    reason="needs the package playwright and Debian's chromium",
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(workspace: Workspace, tmp_path: Path, scheme: str) -> None:
    """A trained run and one whose files attack: nothing runs but our script, nothing is fetched, values are shown."""
    run = workspace.train("out", "run.max_iters=12", "run.eval_interval=4", "run.eval_iters=1")
    attack = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    evil = write_run(
        tmp_path / "<b>evil", [{"step": 1, attack: 1, "loss": 2, "notes": [attack]}], {attack: attack}, attack
    )
    output = tmp_path / "page.html"
    assert main(["report", str(run.folder), evil, "--output", str(output)]) == 0
    program = f"""
import json
from playwright.sync_api import sync_playwright
with sync_playwright() as p:
    browser = p.chromium.launch(executable_path={str(CHROMIUM)!r}, args=["--no-sandbox"])
    page = browser.new_page(viewport={{"width": 1200, "height": 1000}}, color_scheme={scheme!r})
    said, asked = [], []
    page.on("console", lambda m: said.append(m.text))
    page.on("pageerror", lambda e: said.append(str(e)))
    page.on("request", lambda r: asked.append(r.url))
    page.goto("file://{output}")
    page.locator(".plot").first.hover(position={{"x": 200, "y": 60}})
    page.wait_for_selector(".hoverlayer .legend")
    tip = page.locator(".hoverlayer text").all_text_contents()
    cut = page.evaluate("[...document.querySelectorAll('.card')].some(e => e.scrollWidth > e.clientWidth)")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    picture = len(page.screenshot(full_page=True))
    charts = page.locator(".plot .cartesianlayer").count()
    print(json.dumps([page.title(), said, asked, tip, charts, back, wide, cut, picture]))
    browser.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    title, said, asked, tip, charts, back, wide, cut, picture = json.loads(done.stdout)
    assert title == "Report: out, <b>evil"
    assert said == []
    assert asked == [f"file://{output}"]
    assert tip[0].isdigit()  # the step
    assert re.fullmatch(r"out : \d\.\d+", tip[1])
    assert tip[2] == "<b>evil : (1, 2)"
    assert charts > 10
    assert (sum(map(int, re.findall(r"\d+", back))) < 200) == (scheme == "dark")
    assert wide <= 0
    assert not cut
    assert picture > 50_000
