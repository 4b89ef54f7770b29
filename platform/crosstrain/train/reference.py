"""Log-probabilities of every row of a dataset before training, so that no second model sits in memory.

They are measured once and kept in the cache, by weights and samples, and in the run's folder, from which a run resumes.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import numpy as np

from crosstrain.checkpoint.weights import fingerprints
from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import evaluation_batches
from crosstrain.engine.runner import Runner
from crosstrain.modeling.objective import Objective
from crosstrain.utils.errors import TrainingError
from crosstrain.utils.files import read_regular, write_atomically
from crosstrain.utils.logging import log

_SUM = hashlib.sha256().digest_size
_MOST_BYTES = 1 << 36

def add_reference(
    dataset: Dataset, runner: Runner, objective: Objective, micro_batch: int, num_workers: int, own: Path,
    earlier: Path | None,
) -> None:  # fmt: skip
    """Set a dataset's `reference` to what the model with its present weights gives. Collective.

    own: file in the run's folder; earlier: that of the run which this one continues, and whose start is the reference.
    Raises TrainingError where that file is not there.
    """
    world = runner.world
    found = _read(own) if earlier is None or own.exists() else _read(earlier)
    values = world.broadcast(found)
    if values is None and earlier is not None:
        raise TrainingError(f"{earlier}: the reference that the run began with is not there; start it anew")
    if values is None:
        hashes = fingerprints((s for s in runner.shards() if s.kind == "param"), world)
        state = dataset.digest, sorted((name, held.hash) for name, held in hashes.items())
        key = hashlib.sha256(repr(state).encode()).hexdigest()[:32]
        cached = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "crosstrain" / "reference" / key
        values = world.broadcast(_read(cached))
        if values is None:
            log.info("measuring the reference: %d samples", len(dataset))
            values = _measure(dataset, runner, objective, micro_batch, num_workers)
            if world.rank == 0:
                _write(cached, values)
    if world.rank == 0:
        _write(own, values)
    dataset.reference = values


def _measure(
    dataset: Dataset, runner: Runner, objective: Objective, micro_batch: int, num_workers: int
) -> np.ndarray:
    batches = evaluation_batches(
        dataset, micro_batch, dp_rank=runner.dp.rank, dp_size=runner.dp.size, num_workers=num_workers
    )
    mine, objective.measures = {}, True
    with runner.evaluating():
        for micro, counts in batches:
            rows = runner.evaluate(micro.data)
            if counts:
                mine[micro.first_sample] = rows.float().cpu().numpy()
    objective.measures = False
    parts = {first: rows for part in runner.dp.all_gather(mine) for first, rows in part.items()}
    return np.concatenate([parts[first] for first in sorted(parts)]).reshape(len(dataset), -1)


def _read(path: Path) -> np.ndarray | None:
    try:
        data = read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(data[_SUM:]).digest() != data[:_SUM]:
        raise TrainingError(f"{path}: damaged; remove it, or put a copy back")
    return np.load(io.BytesIO(data[_SUM:]), allow_pickle=False)


def _write(path: Path, values: np.ndarray) -> None:
    """Write the array as NumPy does, after the SHA-256 of that."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, hashlib.sha256(file.getvalue()).digest() + file.getvalue())
