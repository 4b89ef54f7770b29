"""Batches of an endless stream of samples, for one data-parallel rank.

Sample n of a run is a pure function of (seed, n); n is the sample number. Each step takes the next `BatchPlan.size`
sample numbers, except those that the run skips. Micro batch m of a step goes to rank m mod dp_size. The first sample
number of a micro batch seeds its dropout, so dropout does not depend on the number of ranks. A checkpoint stores only
the next sample number: a resumed run starts at this number, and replays nothing.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader

from crosstrain.config.batch import BatchPlan
from crosstrain.data import skip_ranges
from crosstrain.data.dataset import Dataset
from crosstrain.utils.errors import DataError, UserError
from crosstrain.utils.forks import CheckedForkContext
from crosstrain.utils.rng import sample_rng
from crosstrain.utils.types import Batch, MicroBatch, Step

_AHEAD = 8  # samples are announced this many micro batches before they are read


class _ByNumber(torch.utils.data.Dataset):
    """A view of a dataset, indexed by sample numbers, for torch's DataLoader."""

    def __init__(self, dataset: Dataset, seed: int, index_of: Callable[[int], int]) -> None:
        self.dataset, self.seed, self.index_of = dataset, seed, index_of

    def __getitems__(self, numbers: Sequence[int]) -> Batch | UserError:
        """Return a batch, or return an error instead of raising it: a worker's exception arrives as a traceback."""
        indices = [self.index_of(number) for number in numbers]
        self.dataset.announce(indices)
        try:
            return self.dataset.collate(
                [
                    self.dataset.get(index, sample_rng(self.seed, number))
                    for index, number in zip(indices, numbers, strict=True)
                ]
            )
        except UserError as error:
            return error


def _batches(
    dataset: Dataset, seed: int, index_of: Callable[[int], int], numbers: Any, num_workers: int
) -> Iterator[Batch]:
    if dataset.far and not num_workers:  # workers already read ahead
        numbers = _announced(dataset, index_of, numbers)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # the user may ask for more workers than cores
    loader = DataLoader(
        _ByNumber(dataset, seed, index_of),
        batch_sampler=numbers,
        collate_fn=lambda batch: batch,
        num_workers=num_workers,
        # Always fork: a spawned process could not import the datasets of plugins.
        multiprocessing_context=CheckedForkContext() if num_workers else None,
        pin_memory=torch.cuda.is_available(),
        # DataLoader draws a seed for each pass. A separate generator leaves the global generator unchanged.
        generator=torch.Generator(),
    )
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch


def _announced(
    dataset: Dataset, index_of: Callable[[int], int], batches: Iterable[Sequence[int]]
) -> Iterator[Sequence[int]]:
    """Yield the batches of sample numbers unchanged. Each batch is announced `_AHEAD` batches before it is yielded."""
    waiting = deque[Sequence[int]]()
    for numbers in batches:
        dataset.announce([index_of(number) for number in numbers])
        waiting.append(numbers)
        if len(waiting) > _AHEAD:
            yield waiting.popleft()
    yield from waiting


def step_numbers(plan: BatchPlan, start: int, left_out: skip_ranges.Ranges | None = None) -> Iterator[list[int]]:
    """Yield the sample numbers of each step, for all ranks together, endlessly, starting at `start`."""
    following = skip_ranges.numbers(start, left_out or [])
    while True:
        numbers = list(islice(following, plan.size(start)))
        yield numbers
        start = numbers[-1] + 1


def share_of_rank(plan: BatchPlan, dp_rank: int, numbers: list[int], consecutive: bool = False) -> list[list[int]]:
    """Return the sample numbers of each micro batch of a data-parallel rank, given those of a step.

    consecutive: the rank gets consecutive micro batches, not every `dp_size`-th.
    """
    micro_batches = [numbers[i : i + plan.micro_batch] for i in range(0, len(numbers), plan.micro_batch)]
    if consecutive:
        own = len(micro_batches) // plan.dp_size
        return micro_batches[dp_rank * own : (dp_rank + 1) * own]
    return micro_batches[dp_rank :: plan.dp_size]


def _check_ids(
    dataset: Dataset, data: Batch, numbers: Sequence[int], index_of: Callable[[int], int], vocab_size: int | None
) -> None:
    """Raise DataError if an ID is too large for the model. Negative IDs are placeholders and ignored labels."""
    for ids in [data[name] for name in ("input_ids", "labels") if name in data]:
        if vocab_size is not None and ids.numel() and (largest := int(ids.max())) >= vocab_size:
            number = numbers[int(ids.argmax()) * len(numbers) // ids.numel()]
            place = dataset.location(index_of(number))
            sample = f"{skip_ranges.show([number])} of the {dataset.split} split{place and f' ({place})'}"
            raise DataError(
                f"datasets: {sample} has token ID {largest}, but the model's vocab_size is {vocab_size}: set the "
                f"vocab_size of a new model to at least {largest + 1}, or prepare the data with the tokenizer of the "
                f"pretrained model"
            )


def training_steps(
    dataset: Dataset,
    plan: BatchPlan,
    *,
    seed: int,
    start: int,
    dp_rank: int,
    num_workers: int = 0,
    lengths: Iterator[int] | None = None,
    left_out: skip_ranges.Ranges | None = None,
    vocab_size: int | None = None,
    consecutive: bool = False,
) -> Iterator[Step]:
    """Yield this rank's micro batches of each step, endlessly, starting at sample number `start`.

    Targets are not counted: `num_targets` is 0.

    lengths: length in tokens to which the samples of each step are shortened; None: full length.
    left_out: sample numbers to skip.
    vocab_size: upper bound of token IDs; DataError is raised for larger IDs. None: token IDs are not checked.
    consecutive: see `share_of_rank`.
    """
    own = partial(share_of_rank, plan, dp_rank, consecutive=consecutive)
    mine = chain.from_iterable(map(own, step_numbers(plan, start, left_out)))  # DataLoader reads these ahead
    index_of = partial(dataset.training_index, seed)
    batches = _batches(dataset, seed, index_of, mine, num_workers)
    whole: Iterator[int | None] = repeat(None)
    for all_numbers, length in zip(step_numbers(plan, start, left_out), lengths or whole, strict=False):
        step = Step()
        step.numbers = all_numbers
        for numbers in own(all_numbers):
            data = next(batches)
            _check_ids(dataset, data, numbers, index_of, vocab_size)
            data = data if length is None else dataset.shorten(data, length)
            step.append(MicroBatch(numbers[0], data, 0, tuple(numbers)))
        yield step


def one_sample(dataset: Dataset, seed: int, number: int) -> Batch:
    """Return a batch with only the run's sample `number`, as in training."""
    return dataset.collate([dataset.get(dataset.training_index(seed, number), sample_rng(seed, number))])


def evaluation_batches(
    dataset: Dataset,
    micro_batch: int,
    *,
    dp_rank: int,
    dp_size: int,
    max_samples: int | None = None,
    num_workers: int = 0,
    vocab_size: int | None = None,
) -> Iterator[tuple[MicroBatch, bool]]:
    """Yield the first `max_samples` samples in evaluation order, each once, as pairs (micro batch, counts).

    Every rank gets the same number of micro batches, because a forward pass may be a collective. A rank with too few
    samples gets the first samples of the split again, with `counts` false. Targets are not counted. vocab_size: see
    `training_steps`.
    """
    total = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    # First sample of each micro batch of this rank; past the end of the split if only other ranks have samples left.
    starts = [first + dp_rank * micro_batch for first in range(0, total, micro_batch * dp_size)]
    mine = [range(start, min(start + micro_batch, total)) or range(min(micro_batch, total)) for start in starts]
    order: Callable[[int], int] = int if total == len(dataset) else dataset.evaluation_index
    batches = _batches(dataset, 0, order, [list(numbers) for numbers in mine], num_workers)
    for start, numbers, data in zip(starts, mine, batches, strict=True):
        _check_ids(dataset, data, numbers, order, vocab_size)
        yield MicroBatch(numbers[0], data, 0, tuple(numbers)), start < total
