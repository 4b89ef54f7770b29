"""benchmarks/gpu.py runs without a GPU, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from conftest import ENVIRONMENT, ROOT


def measured(*options: str) -> list[list[str]]:
    """The cells of the table that the script prints for tiny models on a CPU."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--scale", "tiny", *options],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]


@pytest.mark.slow
def test_the_bits_of_layouts_on_a_cpu() -> None:
    rows = measured("--bitwise", "--rows", "0")
    assert [row[1] for row in rows] == ["ddp@1", "ddp@2", "fsdp@2", "zero2@2", "zero3@2"]
    assert len({(weights, moments) for _, _, weights, moments, _ in rows}) == 1


@pytest.mark.slow
def test_its_table_on_a_cpu() -> None:
    alone, sharded = measured("--peak", "1e11", "--rows", "0", "2")
    assert (alone[1], sharded[1]) == ("1", "2")
    for row in (alone, sharded):
        speed, use, peak, planned, sent, expected = (float(cell.replace(",", "").rstrip("%")) for cell in row[2:8])
        assert 0 < use < 100
        assert speed > 0
        assert peak > planned > 0  # a process takes some tens of MiB for itself
        assert sent == pytest.approx(expected, rel=0.01, abs=0.05)  # a norm and a loss are sent, too
    assert float(sharded[6]) > 0
