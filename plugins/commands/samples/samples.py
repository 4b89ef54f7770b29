"""Samples of a project as training receives them: their origin, and their text with the target tokens marked."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from crosstrain import (
    IGNORE_INDEX,
    IMAGE,
    IMAGE_ID,
    SHARED,
    SPLITS,
    ProjectLike,
    Sample,
    Split,
    TextTokenizer,
    UserError,
    load_config,
    load_tokenizer,
    log,
    printable,
)
from crosstrain.config.sources import Overrides
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.utils.rng import sample_rng

_GREEN, _DIM, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"
_OF_TOKENS = ("input_ids", "labels", "position_ids", "segments", "rows")
_SHOWN = 16  # other arrays are shown in full if they have at most this many values

_Token = tuple[int, bool, str]  # ID, whether it is a target, heading if a new document or conversation begins here


@dataclass(frozen=True)
class SampleView:
    """A sample as the model receives it. `print` shows the sample, with target tokens in «»."""

    title: str  # number, index and origin of the sample
    data: Mapping[str, Any]  # arrays from `Dataset.get`
    tokenizer: TextTokenizer | None

    @property
    def rows(self) -> list[Sample]:
        """The token sequences in the sample; an empty list for data without tokens."""
        if "rows" in self.data or "input_ids" not in self.data:
            return self.data.get("rows", [])
        keys = [key for key in _OF_TOKENS if key in self.data]
        arrays = {key: np.atleast_2d(np.asarray(self.data[key])) for key in keys}
        return [{key: arrays[key][row] for key in keys} for row in range(len(arrays["input_ids"]))]

    def text(self, *, ids: bool = False, colour: bool = False) -> str:
        """Return each row's tokens as text or IDs, with target tokens in «» or green, and then the other arrays.

        A prompt has no target tokens: it is shown with its template, as a sampler completes it.
        """
        decode = self.tokenizer.decode if self.tokenizer and not ids else None
        lines = []
        for number, row in enumerate(self.rows):
            lines += [f"--- row {number}"] if len(self.rows) > 1 else []
            lines.append(_marked(list(_tokens(row)), decode, colour))
        for key in self.data.keys() - {*_OF_TOKENS}:
            values = np.asarray(self.data[key])
            shown = values.tolist() if values.size <= _SHOWN else f"{values.dtype} {list(values.shape)}"
            # `answer` holds tokens that are not in the rows: the reference answer to a prompt.
            lines.append(
                f"{key}: {printable(decode(values.ravel().tolist())) if decode and key == 'answer' else shown}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"{printable(self.title)}\n{self.text()}"


def _tokens(row: Sample) -> Iterator[_Token]:
    """Yield the tokens of a row, and the targets that are not in the input. Each label is the next token."""
    ids, labels = (np.asarray(row[key]).tolist() if key in row else [] for key in ("input_ids", "labels"))
    labels = labels or [IGNORE_INDEX] * len(ids)
    begins = _beginnings(row, len(ids))
    if ids:
        yield ids[0], False, ""
    for place, (label, following) in enumerate(zip(labels, [*ids[1:], None], strict=True)):
        learned, begin = label != IGNORE_INDEX, begins.get(place + 1, "")
        if learned and (begin or following is None):  # the last token of a document is only a label
            yield label, True, ""
        if following is not None:
            yield following, learned and not begin, begin


def _beginnings(row: Sample, length: int) -> dict[int, str]:
    """Return position -> heading for each start of a new document or of a new conversation about the same images."""
    if "segments" in row:
        segments = np.asarray(row["segments"]).tolist()
        changes = (i for i in range(1, length) if SHARED != segments[i - 1] != segments[i])
        return dict.fromkeys(changes, "next conversation about the same images")
    positions = np.asarray(row.get("position_ids", ()))
    return dict.fromkeys(np.flatnonzero(positions[1:] == 0) + 1, "next document")


def _marked(tokens: Iterable[_Token], decode: Callable[[list[int]], str] | None, colour: bool) -> str:
    text = ""
    for (trained, begin, is_image), group in groupby(tokens, lambda token: (*token[1:], token[0] == IMAGE_ID)):
        ids = [token for token, _, _ in group]
        words = printable(decode(ids)) if decode and not is_image else " ".join(map(str, ids))
        part = IMAGE if is_image else words
        if colour:
            part = f"{_GREEN if trained else _DIM}{part}{_PLAIN}"
        elif trained:
            part = f"«{part}»"
        between = "" if decode or not text else " "
        text += f"\n--- {begin}\n{part}" if begin else between + part
    return text


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
