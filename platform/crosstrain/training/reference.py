"""Log-probabilities of every row of a dataset before training, so that no second model sits in memory.

They are measured once and kept in the cache, by weights and samples, and in the run's folder, from which a run resumes.
"""

from __future__ import annotations

import hashlib
import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from crosstrain.checkpoint.load_weights import fingerprints
from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import evaluation_batches
from crosstrain.engine.runner import Runner
from crosstrain.modeling.forward_mode import ForwardMode
from crosstrain.modeling.objective import log_probabilities
from crosstrain.utils import storage
from crosstrain.utils.errors import EmptySplit, TrainingError
from crosstrain.utils.files import cache_folder, read_regular, write_atomically
from crosstrain.utils.logging import log

_SUM = hashlib.sha256().digest_size
_MOST_BYTES = 1 << 36


def add_reference(
    dataset: Dataset, runner: Runner, weights: object, micro_batch: int, num_workers: int, own: Path,
    earlier: Path | None,
) -> None:  # fmt: skip
    """Set a dataset's `reference` to what the model with its present weights gives. Collective.

    weights: what tells them and their arithmetic apart, besides the parameters that the runner holds; own: file in the
    run's folder; earlier: that of the run which this one continues, and whose start is the reference. Raises
    TrainingError where that file is not there, damaged, or of other data.
    """
    world = runner.world
    values = world.broadcast(None if earlier is None else _read(earlier, dataset.digest))
    if values is None and earlier is not None:
        raise TrainingError(f"{earlier}: the reference that the run began with is not there; start it anew")
    if values is None:
        hashes = fingerprints((s for s in runner.held.shards() if s.kind == "param"), world)
        state = dataset.digest, weights, sorted((name, held.hash) for name, held in hashes.items())
        cached = cache_folder("reference") / hashlib.sha256(repr(state).encode()).hexdigest()[:32]
        with suppress(TrainingError):  # damaged: it is measured again
            values = _read(cached, dataset.digest)
        values = world.broadcast(values)
        if values is None:
            log.info("measuring the reference: %d samples", len(dataset))
            values = _measure(dataset, runner, micro_batch, num_workers)
            if world.rank == 0:
                _write(cached, values, dataset.digest)
    if world.rank == 0:
        _write(own, values, dataset.digest)
    dataset.reference = values


def reference_file(folder: Path, split: str) -> Path:
    """The file of a run's folder that keeps a split's reference."""
    return folder / f"reference_{split}.bin"


def read_reference(checkpoint: Path, dataset: Dataset) -> np.ndarray:
    """Return the reference that a checkpoint's run measured.

    Raises EmptySplit where it has measured none, and TrainingError for a damaged one, or of other data.
    """
    path = reference_file(checkpoint.parent.parent, dataset.split)
    if (values := _read(path, dataset.digest)) is None:
        raise EmptySplit(f"run.objective compares with a reference that is measured in training, and {path} is missing")
    return values


def _measure(dataset: Dataset, runner: Runner, micro_batch: int, num_workers: int) -> np.ndarray:
    """Numbers [samples, rows], or [samples, rows, length] for each token, 0 behind the end of shorter rows."""
    batches = evaluation_batches(
        dataset, micro_batch, dp_rank=runner.dp.rank, dp_size=runner.dp.size, num_workers=num_workers,
        vocab_size=runner.model.vocab_size,
    )  # fmt: skip
    by_token = runner.objective.needs_reference == "tokens"
    mine, mode = {}, ForwardMode(reduce=torch.neg if by_token else log_probabilities)
    with runner.evaluating():
        for micro, counts in batches:
            rows = runner.evaluate(micro.data, mode)
            if counts:
                mine[micro.first_sample] = rows.float().cpu().numpy()
    parts = {first: rows for part in runner.dp.all_gather(mine) for first, rows in part.items()}
    found = [parts[first] for first in sorted(parts)]
    if not by_token:
        return np.concatenate(found).reshape(len(dataset), -1)
    length = max(rows.shape[1] for rows in found)
    padded = [np.pad(rows, ((0, 0), (0, length - rows.shape[1]))) for rows in found]
    return np.concatenate(padded).reshape(len(dataset), -1, length)


def _read(path: Path, digest: str) -> np.ndarray | None:
    try:
        url = None if path.exists() else storage.origin(path)  # of a run in a bucket, perhaps of another machine's
        data = storage.read(url) if url else read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read ({error.strerror})") from None
    if data[:_SUM] != _sum(data[_SUM:], digest):
        raise TrainingError(f"{path}: damaged, or of other data; put back what was there, or start the run anew")
    return np.load(io.BytesIO(data[_SUM:]), allow_pickle=False)


def _write(path: Path, values: np.ndarray, digest: str) -> None:
    """Write the array as NumPy does, after a sum of it and the data."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _sum(file.getvalue(), digest) + file.getvalue())


def _sum(data: bytes, digest: str) -> bytes:
    return hashlib.sha256(digest.encode() + data).digest()
