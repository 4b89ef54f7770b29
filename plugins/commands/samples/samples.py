"""Samples of a project as training receives them."""

from collections.abc import Iterable

from crosstrain import SPLITS, ProjectLike, SampleView, Split, UserError, load_config, load_tokenizer, log
from crosstrain.config.sources import Overrides
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.utils.rng import sample_rng


def samples(
    project: ProjectLike,
    split: Split = "train",
    numbers: Iterable[int] = (0,),
    options: Overrides = (),
) -> list[SampleView]:
    """Return samples of a split; `numbers` are positions in training order (`train`) or file order (`val`, `test`).

    Data that does not exist yet is prepared first. Raises UserError for invalid arguments.
    """
    if split not in SPLITS:
        raise UserError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
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
            raise UserError(
                f"--number: the {len(dataset)} samples of the {split} split are numbered from 0, got {number}"
            )
        index = dataset.training_index(seed, number) if split == "train" else number
        parts = (f"sample {number} of {split}", f"index {index} of {len(dataset)}", dataset.location(index))
        views.append(
            SampleView(", ".join(filter(None, parts)), dataset.get(index, sample_rng(seed, number)), tokenizer)
        )
    return views
