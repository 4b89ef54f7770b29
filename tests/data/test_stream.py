"""Which samples a rank sees: the same ones in the same micro batches for any number of ranks, from any start."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from crosstrain_plugins.builtin.datasets.vision.conversations import IMAGE_ID
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.config.batch import BatchPlan
from crosstrain.config.run_options import BatchWarmupOptions, RunOptions
from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import evaluation_batches, share_of_rank, step_numbers, training_steps
from crosstrain.utils.errors import ConfigError, DataError
from crosstrain.utils.types import IGNORE_INDEX, MicroBatch, Sample


class Numbers(Dataset):
    """Sample i is i, with a random number of its own beside it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        return {"index": np.array(index), "noise": rng.random(2)}


def steps(length: int, plan: BatchPlan, rank: int, start: int, count: int) -> list[list[MicroBatch]]:
    stream = training_steps(Numbers(length), plan, seed=3, start=start, dp_rank=rank)
    return list(itertools.islice(stream, count))


def flat(per_rank: list[list[list[MicroBatch]]]) -> list[tuple[int, list[int], list[list[float]]]]:
    """Every micro batch of the first steps, in the order of sample numbers."""
    micro = [m for rank in per_rank for step in rank for m in step]
    micro.sort(key=lambda m: m.first_sample)
    return [(m.first_sample, m.data["index"].tolist(), m.data["noise"].tolist()) for m in micro]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 50), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 200))
def test_workers_share_one_stream(length: int, ranks: int, micro: int, start: int) -> None:
    one = BatchPlan(4 * micro, micro, 4, 1)
    many = BatchPlan(4 * micro, micro, 4 // ranks, ranks)
    expected = flat([steps(length, one, 0, start, 3)])
    assert flat([steps(length, many, rank, start, 3) for rank in range(ranks)]) == expected
    assert [first for first, _, _ in expected] == list(range(start, start + 12 * micro, micro))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(0, 5))
def test_seeking_is_the_same_as_having_read(length: int, skipped: int) -> None:
    plan = BatchPlan(6, 2, 3, 1)
    everything = flat([steps(length, plan, 0, 0, skipped + 4)])
    assert flat([steps(length, plan, 0, 6 * skipped, 4)]) == everything[3 * skipped :]


def test_the_batch_grows_with_the_samples_before_it() -> None:
    """Megatron-LM's ramp: equal shares of 18 samples for each of 2, 4 and 6 samples per step; then 8."""
    warmup = BatchWarmupOptions(2, 18)
    plan = BatchPlan(8, 2, 4, 1, warmup)
    sizes = [len(numbers) for numbers in itertools.islice(step_numbers(plan, 0), 9)]
    assert sizes == [2, 2, 2, 4, 4, 6, 8, 8, 8]
    everything = list(itertools.islice(step_numbers(plan, 0), 9))
    for number, numbers in enumerate(everything):
        assert next(step_numbers(plan, numbers[0])) == numbers, "a resumed run has the same steps"
        assert numbers[0] == sum(sizes[:number])
    run = RunOptions(output_dir="x", max_epoch=2, global_batch_size=8)
    assert plan.steps(run, 20) == 9  # 20 samples in 6 steps, and 20 more in 3
    for consecutive in (False, True):
        ranks = [share_of_rank(BatchPlan(8, 2, 2, 2, warmup), rank, everything[3], consecutive) for rank in (0, 1)]
        assert sorted(itertools.chain(*ranks)) == [everything[3][:2], everything[3][2:]]


@pytest.mark.parametrize(("start", "increment"), [(3, None), (8, None), (2, 4), (1, 1)])
def test_sizes_that_do_not_fit_are_refused(start: int, increment: int | None) -> None:
    run = RunOptions(
        output_dir="x", max_iters=5, global_batch_size=8, micro_batch_size=2,
        batch_warmup=BatchWarmupOptions(start, 18, increment),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="batch_warmup"):
        BatchPlan.of(run, 1)


def test_an_epoch_shows_every_sample_once_and_the_next_in_another_order() -> None:
    plan = BatchPlan(5, 5, 1, 1)
    seen = [i for _, indices, _ in flat([steps(20, plan, 0, 0, 12)]) for i in indices]
    epochs = [seen[k : k + 20] for k in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_worker_processes_change_nothing() -> None:
    plan = BatchPlan(4, 2, 2, 1)
    stream = training_steps(Numbers(30), plan, seed=3, start=8, dp_rank=0, num_workers=2)
    assert flat([list(itertools.islice(stream, 5))]) == flat([steps(30, plan, 0, 8, 5)])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 50)))
def test_evaluation_counts_every_sample_once_and_keeps_ranks_in_step(
    length: int, micro: int, ranks: int, limit: int | None
) -> None:
    per_rank = [
        list(evaluation_batches(Numbers(length), micro, dp_rank=rank, dp_size=ranks, max_samples=limit))
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in per_rank}) == 1, "a rank with fewer forwards would leave the others waiting"
    counted = [i for batches in per_rank for m, counts in batches if counts for i in m.data["index"].tolist()]
    assert sorted(counted) == list(range(min(length, limit or length)))


class Tokens(Dataset):
    """Twelve samples of tokens below 100, of which some are replaced: {(sample, key, position): id}."""

    def __init__(self, replaced: dict[tuple[int, str, int], int]) -> None:
        super().__init__(None, "train")
        self.replaced = replaced

    def __len__(self) -> int:
        return 12

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        sample = {name: np.arange(8) + index for name in ("input_ids", "labels")}
        for (number, name, position), replacement in self.replaced.items():
            if number == index:
                sample[name][position] = replacement
        return sample

    def location(self, index: int) -> str:
        return f"line {index} of a file"


@pytest.mark.parametrize(("key", "workers"), [("input_ids", 0), pytest.param("labels", 2, marks=pytest.mark.slow)])
def test_an_id_that_is_no_token_of_the_model_is_refused_before_a_forward(key: str, workers: int) -> None:
    harmless = {(3, "input_ids", 0): IMAGE_ID, (4, "labels", 0): IGNORE_INDEX}
    plan = BatchPlan(12, 4, 3, 1)
    for replacement in (99, 100):
        dataset = Tokens(harmless | {(6, key, 7): replacement})
        wrong = r"sample {} of the train split \(line 6 of a file\) has token ID 100, .* vocab_size is 100: .* 101"
        number = next(n for n in range(12) if dataset.training_index(3, n) == 6)

        def both(vocab_size: int | None, dataset: Dataset = dataset) -> list[Callable[[], object]]:
            stream = training_steps(
                dataset, plan, seed=3, start=0, dp_rank=0, num_workers=workers, vocab_size=vocab_size
            )
            evaluation = evaluation_batches(
                dataset, 4, dp_rank=0, dp_size=1, num_workers=workers, vocab_size=vocab_size
            )
            return [lambda: next(stream), lambda: list(evaluation)]

        for read, place in zip(both(100), (number, 6), strict=True):
            if replacement < 100:
                read()
            else:
                with pytest.raises(DataError, match=wrong.format(place)):
                    read()
        for read in both(None):  # a model without tokens
            read()
