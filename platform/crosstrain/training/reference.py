"""Reference log-probabilities of every row of a dataset, measured before training to avoid a second model in memory.

The log-probabilities are stored in the run's folder, because a resumed run needs them.
"""

import hashlib
import io
from pathlib import Path

import numpy as np
import torch

from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import evaluation_batches
from crosstrain.engine.runner import Runner
from crosstrain.modeling.forward_mode import ForwardMode
from crosstrain.modeling.objective import log_probabilities
from crosstrain.utils import storage
from crosstrain.utils.errors import EmptySplit, TrainingError
from crosstrain.utils.files import read_regular, write_atomically
from crosstrain.utils.logging import log

_SUM = hashlib.sha256().digest_size
_MOST_BYTES = 1 << 36


def add_reference(
    dataset: Dataset, runner: Runner, micro_batch: int, num_workers: int, folder: Path, start: Path | None
) -> None:
    """Set a dataset's `reference` to log-probabilities of the model with its current weights. Collective.

    folder: the run's folder, where the values are stored. start: checkpoint that the run continues from; the values of
    that checkpoint's run are read instead of measured. None: a new run. Raises TrainingError if the values to read are
    missing or damaged, or were measured on different data.
    """
    if start is None:
        log.info("measuring the log-probabilities of the reference: %d samples", len(dataset))
        dataset.reference = _measure(dataset, runner, micro_batch, num_workers)
    else:
        earlier = reference_file(start.parent.parent, dataset.split)
        dataset.reference = runner.world.broadcast(_read(earlier, dataset.digest))
        if dataset.reference is None:
            raise TrainingError(f"{earlier}: the reference that the run started with is missing; start the run over")
    if runner.world.rank == 0:
        _write(reference_file(folder, dataset.split), dataset.reference, dataset.digest)


def reference_file(folder: Path, split: str) -> Path:
    """Return the path of a split's reference file in a run's folder."""
    return folder / f"reference_{split}.bin"


def read_reference(checkpoint: Path, dataset: Dataset) -> np.ndarray:
    """Return the reference values measured by a checkpoint's run.

    Raises EmptySplit if the file is missing, and TrainingError if the file is damaged or belongs to different data.
    """
    path = reference_file(checkpoint.parent.parent, dataset.split)
    if (values := _read(path, dataset.digest)) is None:
        raise EmptySplit(f"run.objective compares with a reference that is measured in training, but {path} is missing")
    return values


def _measure(dataset: Dataset, runner: Runner, micro_batch: int, num_workers: int) -> np.ndarray:
    """Measure log-probabilities [samples, rows], or per token [samples, rows, length], padded with 0 after each row."""
    batches = evaluation_batches(
        dataset,
        micro_batch,
        dp_rank=runner.dp.rank,
        dp_size=runner.dp.size,
        num_workers=num_workers,
        vocab_size=runner.model.vocab_size,
    )
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
    found = [np.pad(rows, ((0, 0), (0, length - rows.shape[1]))) for rows in found]
    return np.concatenate(found).reshape(len(dataset), -1, length)


def _read(path: Path, digest: str) -> np.ndarray | None:
    try:
        url = None if path.exists() else storage.origin(path)  # a run in a bucket may come from a different machine
        data = storage.read(url) if url else read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read ({error.strerror})") from None
    if data[:_SUM] != _sum(data[_SUM:], digest):
        raise TrainingError(f"{path}: damaged, or measured on different data; restore the file, or start the run over")
    return np.load(io.BytesIO(data[_SUM:]), allow_pickle=False)


def _write(path: Path, values: np.ndarray, digest: str) -> None:
    """Write a checksum over the dataset's digest and the array, followed by the array in NumPy's format."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    write_atomically(path, _sum(file.getvalue(), digest) + file.getvalue())


def _sum(data: bytes, digest: str) -> bytes:
    return hashlib.sha256(digest.encode() + data).digest()
