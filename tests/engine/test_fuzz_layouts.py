"""Random combinations of a model and a layout; `benchmarks/fuzz_layouts.py` tries more, and longer runs."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest

from conftest import ROOT
from fixtures_ranks import run_ranks

STEPS, LAYOUTS, RANKS = 2, 5, 2


def judged(seed: int, folder: str) -> list[str]:
    """Run in a process that has not computed gradients yet, so that it can fork ranks: return the verdicts."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import fuzz_layouts as fuzz  # type: ignore[import-not-found]

    rng = random.Random(seed)
    what = replace(fuzz.draw_what(rng), batch=4, micro_batch=1)
    fuzzer = fuzz.Fuzzer(Path(folder), STEPS)
    drawn = (fuzz.draw_how(rng, what, STEPS) for _ in count())
    layouts = islice((how for how in drawn if max(how.ranks, how.next_ranks) <= RANKS), LAYOUTS)
    return [f"{fuzzer.judge(what, how)}\n{what}\n{how}" for how in layouts]


@pytest.mark.parametrize("seed", range(10))
def test_layouts_are_equal_to_one_process_or_refused(seed: int, tmp_path: Path) -> None:
    (verdicts,) = run_ranks(1, judged, seed, str(tmp_path), seconds=600)
    assert [verdict for verdict in verdicts if verdict.startswith("FAILED")] == []
