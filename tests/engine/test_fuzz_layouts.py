"""Random combinations of a model and a layout; `benchmarks/fuzz_layouts.py` tries more, and longer runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import ROOT
from fixtures_ranks import mostly_slow

STEPS, LAYOUTS = 2, 5


@pytest.mark.parametrize("seed", mostly_slow(range(10), [7, 9]))
def test_every_layout_is_equal_to_one_process_or_refused(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fuzz_layouts as fuzz  # type: ignore[import-not-found]

    rng = random.Random(seed)
    what = replace(fuzz.draw_what(rng), batch=4, micro_batch=1)
    fuzzer = fuzz.Fuzzer(tmp_path, STEPS)
    for how in [fuzz.draw_how(rng, what, STEPS) for _ in range(LAYOUTS)]:
        verdict = fuzzer.judge(what, how)
        assert not verdict.startswith("FAILED"), f"{verdict}\n{what}\n{how}"
