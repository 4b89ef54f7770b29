"""Samples of a project as training receives them."""

from collections.abc import Iterable, Mapping
from typing import Any

from crosstrain import SPLITS, SampleView, Split, UserError, load_config, log
from crosstrain.config.load import ProjectLike
from crosstrain.config.sources import Overrides
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils.rng import sample_rng


def samples(
    project: ProjectLike,
    split: Split = "train",
    numbers: Iterable[int] = (0,),
    options: Overrides = (),
) -> list[SampleView]:
    """Return samples of a split; `numbers` are positions in training order (`train`) or file order (`val`, `test`).

    Missing data is prepared. Raises UserError for invalid arguments.
    """
    if split not in SPLITS:
        raise UserError(f"split: there is no split {split!r}; the splits are {', '.join(SPLITS)}")
    config = load_config(project, options)
    prepare_data(config)
    dataset = open_split(config, split)
    seed = config.run.seed if split == "train" else 0
    if dataset.notice:
        log.warning(dataset.notice)
    tokenizer = None if dataset.tokenizer_path is None else load_tokenizer(dataset.tokenizer_path)
    views = []
    for number in numbers:
        if number < 0 or (split != "train" and number >= len(dataset)):
            raise UserError(f"--number: {number} is none of the {len(dataset)} samples of the {split} split, from 0 on")
        index = dataset.training_index(seed, number) if split == "train" else number
        data: Mapping[str, Any] = dataset.get(index, sample_rng(seed, number))
        origin = (f"index {index} of {len(dataset)}", dataset.location(index))
        title = ", ".join(filter(None, (f"sample {number} of {split}", *origin)))
        views.append(SampleView(title, data, tokenizer))
    return views
