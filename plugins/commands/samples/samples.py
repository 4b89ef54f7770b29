"""Samples of a project as training receives them."""

from collections.abc import Iterable, Mapping
from typing import Any

from crosstrain import SPLITS, Config, Dataset, SampleView, Split, UserError, load_config, log
from crosstrain.config.load import ProjectLike
from crosstrain.config.sources import Overrides
from crosstrain.data.loader import share_of_rank, step_numbers
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.engine.checks import batch_plan
from crosstrain.utils.rng import sample_rng


def samples(
    project: ProjectLike,
    split: Split = "train",
    numbers: Iterable[int] = (0,),
    options: Overrides = (),
    *,
    step: int | None = None,
    rank: int = 0,
    nproc_per_node: int = 1,
) -> list[SampleView]:
    """Return samples of a split; `numbers` are positions in training order (`train`) or file order (`val`, `test`).

    With `step` (1, 2, ...), return instead the samples of data-parallel rank `rank` of `nproc_per_node` workers at that
    step, in the order of its micro batches. Missing data is prepared. Raises UserError for invalid arguments.
    """
    if split not in SPLITS:
        raise UserError(f"split: there is no split {split!r}; the splits are {', '.join(SPLITS)}")
    if step is not None and (split != "train" or step < 1):
        raise UserError(f"--step: {step} of {split}; only train has steps, and the first is 1")
    config = load_config(project, options)
    prepare_data(config)
    dataset = open_split(config, split)
    seed = config.run.seed if split == "train" else 0
    length, wanted = None, [("", number) for number in numbers]
    if step is not None:
        length, wanted = _of_step(config, dataset, step, rank, nproc_per_node)
    for _, number in wanted:
        if number < 0 or (split != "train" and number >= len(dataset)):
            raise UserError(f"--number: {number} is none of the {len(dataset)} samples of the {split} split, from 0 on")
    if dataset.notice:
        log.warning(dataset.notice)
    tokenizer = None if dataset.tokenizer_path is None else load_tokenizer(dataset.tokenizer_path)
    views = []
    for place, number in wanted:
        index = dataset.training_index(seed, number) if split == "train" else number
        data: Mapping[str, Any] = dataset.get(index, sample_rng(seed, number))
        if length is not None:
            data = dataset.shorten(dataset.collate([dict(data)]), length)
        origin = (f"index {index} of {len(dataset)}", dataset.location(index))
        title = ", ".join(filter(None, (place, f"sample {number} of {split}", *origin)))
        views.append(SampleView(title, data, tokenizer, dataset.normalization(index)))
    return views


def _of_step(
    config: Config, dataset: Dataset, step: int, rank: int, world_size: int
) -> tuple[int | None, list[tuple[str, int]]]:
    """Return the length of shortened samples (None: keep it), and (place, number) of each sample."""
    run, plan = config.run, batch_plan(config, world_size)
    if not 0 <= rank < plan.dp_size:
        raise UserError(f"--rank: {rank} is none of the {plan.dp_size} data-parallel ranks, from 0 on")
    curriculum = run.curriculum
    length = None if curriculum is None else curriculum.length(step, curriculum.check(dataset.sequence_length))
    start = (step - 1) * plan.global_batch
    shares = enumerate(share_of_rank(plan, rank, next(step_numbers(plan, start))))
    wanted = [(f"step {step}, rank {rank}, micro batch {m}", number) for m, share in shares for number in share]
    return length, wanted
