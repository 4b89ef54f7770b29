"""A mixture of datasets in given proportions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import MinLen

from crosstrain import (
    SPLITS,
    Batch,
    Component,
    DataError,
    Dataset,
    EmptySplit,
    EncodeText,
    Example,
    Message,
    NonNegativeFloat,
    OptionError,
    PositiveInt,
    PromptBuilder,
    Sample,
    Split,
    VqaDataset,
    derive_seed,
    log,
    registry,
)
from crosstrain.data.splits import open_dataset
from crosstrain.data.tokenizer import TOKENIZER, vocabulary

from .mixture_order import StagedOrder


@dataclass
class MixturePart:
    """A dataset and its share of the samples."""

    dataset: Annotated[Component, "dataset"]  # any registered dataset
    # share relative to other parts; 0: only in later stages; None (in all parts): in proportion to size
    ratio: NonNegativeFloat | None = None
    label: str | None = None  # name in samples, scores and errors; None: the part's index and dataset name


@dataclass
class MixtureStage:
    """Shares of the parts from one training sample on."""

    after: PositiveInt  # number of earlier training samples: steps x global_batch_size
    ratios: list[NonNegativeFloat]  # share of each part, in the order of the parts; 0 leaves a part out


@registry.register_dataset("mixture")
class Mixture(VqaDataset):
    """A mixture of datasets: after any number of samples, each part's count is within one sample of its share.

    Each part is shuffled and repeated independently. An epoch contains every sample of every part; parts that are too
    small for their share are repeated. With `stages`, the shares change during training, and an epoch has as many
    samples as all parts together. The parts must have the same tokenizer. The val and test splits use each sample once,
    in the proportions at the beginning until the smaller parts run out; parts without samples are skipped.
    """

    @dataclass
    class Options:
        """Datasets to mix, with their shares."""

        parts: Annotated[list[MixturePart], MinLen(1)]  # datasets and their shares
        stages: list[MixtureStage] = field(default_factory=list)  # shares from given samples on, in their order

        def __post_init__(self) -> None:
            given = [part.ratio for part in self.parts]
            if None in given and any(ratio is not None for ratio in given):
                raise OptionError("parts", "give a ratio to all parts or to none")
            starts = [0, *(stage.after for stage in self.stages)]
            if sorted(set(starts)) != starts:
                raise OptionError("stages", f"begin after {starts[1:]} samples, but must be in order")
            shares = [given, *(stage.ratios for stage in self.stages)]
            if any(len(ratios) != len(given) or not any(r != 0 for r in ratios) for ratios in shares):
                raise OptionError("stages", "each stage needs one ratio for each part, and one that is not 0")
            for k in range(len(given)):
                if all(ratios[k] == 0 for ratios in shares):
                    raise OptionError("parts", f"no stage uses part {k}: its ratio is 0")

    options: Options

    @classmethod
    def prepare(cls, options: Any) -> None:
        for part in options.parts:
            registry.get("dataset", part.dataset.name).prepare(part.dataset.options)

    @classmethod
    def is_prepared(cls, options: Any) -> bool:
        return all([registry.get("dataset", p.dataset.name).is_prepared(p.dataset.options) for p in options.parts])

    @classmethod
    def named_splits(cls, options: Any) -> list[Split]:
        """Return the splits for which every part has files."""
        named = [registry.get("dataset", p.dataset.name).named_splits(p.dataset.options) for p in options.parts]
        return [split for split in SPLITS if all(split in names for names in named)]

    @classmethod
    def shapes(cls, options: Any) -> Batch | None:
        """Return the shapes of the part with the largest batch; None if the shapes of any part are unknown."""
        found = [registry.get("dataset", p.dataset.name).shapes(p.dataset.options) for p in options.parts]
        known = [batch for batch in found if batch is not None]
        if len(known) < len(found):
            return None
        return max(known, key=lambda batch: sum(tensor.numel() for tensor in batch.values()))

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        self.parts, given, absent = list[Dataset](), list[MixturePart](), list[EmptySplit]()
        for number, part in enumerate(options.parts):
            label = part.label or f"part {number} ({part.dataset.name})"
            try:
                self.parts.append(open_dataset(part.dataset, split, label))
                given.append(part)
            except EmptySplit as error:
                absent.append(error)
        if absent and (split == "train" or not self.parts):
            raise absent[0]
        first = self.parts[0]
        for part in self.parts[1:]:
            if not _same_vocabulary(part.tokenizer_path, first.tokenizer_path):
                raise DataError("the parts of a mixture have different tokenizers: give all parts the same one")
            if part.documents != first.documents:
                raise DataError("either all parts of a mixture must separate the documents of a sample, or none")
        if any(part.row_layout for part in self.parts):
            raise DataError("preference datasets cannot be mixed: list all their files in one dataset")
        self.vocab_size, self.tokenizer_path = first.vocab_size, first.tokenizer_path
        self.documents, self.end_tokens = first.documents, tuple(sorted({t for p in self.parts for t in p.end_tokens}))
        self.notice = "; ".join(f"{part.address}: {part.notice}" for part in self.parts if part.notice)
        self.far = any(part.far for part in self.parts)
        longest = [part.sequence_length for part in self.parts]
        if len({*longest}) > 1 and type(first).collate is Dataset.collate:
            raise DataError(
                f"the parts of a mixture have samples of {longest} tokens: give all parts the same seq_length"
            )
        self.sequence_length = None if None in longest else max(length or 0 for length in longest)
        lengths = [len(part) for part in self.parts]
        ratios = [part.ratio for part in given]
        weights = lengths if ratios[0] is None else ratios
        stages = {stage.after: stage.ratios for stage in options.stages} if split == "train" else {}
        self.order = StagedOrder({0: weights} | stages)
        counts = epoch_counts(lengths, ratios) if split == "train" and not stages else lengths
        self.starts = [0, *accumulate(counts)]
        # Evaluation uses each sample once, in the given proportions until the smaller parts run out. A part that only
        # later stages use comes last.
        due = [np.arange(1, n + 1) / (weight or 1e-9) for n, weight in zip(lengths, weights, strict=True)]
        self.places = None if split == "train" else np.argsort(np.concatenate(due), kind="stable")

    @property
    def image_sizes(self) -> frozenset[tuple[int, int]]:  # type: ignore[override]
        return frozenset().union(*(part.image_sizes for part in self.parts if isinstance(part, VqaDataset)))

    def __len__(self) -> int:
        return self.starts[-1]

    def _at(self, index: int) -> tuple[int, int]:
        """Return (number of a part, index in this part)."""
        k = int(np.searchsorted(self.starts, index, "right")) - 1
        return k, (index - self.starts[k]) % len(self.parts[k])

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        k, inner = self._at(index)
        return self.parts[k].get(inner, rng)

    def announce(self, indices: Sequence[int]) -> None:
        places = [self._at(index) for index in indices]
        for number, part in enumerate(self.parts):
            part.announce([inner for k, inner in places if k == number])

    def training_index(self, seed: int, number: int) -> int:
        k, n = self.order.place(number)
        return self.starts[k] + self.parts[k].training_index(derive_seed(seed, "part", k), n)

    def location(self, index: int) -> str:
        k, inner = self._at(index)
        return f"{self.parts[k].address}, {self.parts[k].location(inner)}".rstrip(", ")

    def evaluation_index(self, place: int) -> int:
        k, n = self.order.place(place) if self.places is None else self._at(int(self.places[place]))
        return self.starts[k] + self.parts[k].evaluation_index(n % len(self.parts[k]))

    def shorten(self, batch: Batch, length: int) -> Batch:
        return self.parts[0].shorten(batch, length)

    def collate(self, samples: list[Sample]) -> Batch:
        return self.parts[0].collate(samples)

    def examples(self, index: int) -> list[Example]:
        k, inner = self._at(index)
        part = self.parts[k]
        found = part.examples(inner) if isinstance(part, VqaDataset) else []
        label = f"{part.address}, " if len(self.parts) > 1 else ""
        return [replace(example, kind=f"{label}{example.kind}") for example in found]

    @classmethod
    def prompt_builder(cls, options: Any, tokenizer: Path, encode: EncodeText | None = None) -> PromptBuilder:
        """Return the prompt builder of the first part with conversations; warn if the parts' prompts differ."""
        kinds = [(part, registry.get("dataset", part.dataset.name)) for part in options.parts]
        talking = [(part, kind) for part, kind in kinds if issubclass(kind, VqaDataset)] or kinds[:1]
        builders = [kind.prompt_builder(part.dataset.options, tokenizer, encode) for part, kind in talking]
        forms = [builder.ask([Message("user", "a")], [])["input_ids"].tolist() for builder in builders]
        if any(form != forms[0] for form in forms):
            log.warning(
                "the mixture's parts have different conversation formats; chats use the format of %s",
                talking[0][0].label or talking[0][0].dataset.name,
            )
        return builders[0]


def epoch_counts(lengths: list[int], ratios: list[float | None]) -> list[int]:
    """Return the parts' sample counts, rounded up, in the shortest epoch that has all samples and keeps the ratios."""
    if ratios[0] is None:
        return lengths
    shares = [(r or 0.0) / sum(r or 0.0 for r in ratios) for r in ratios]
    total = max(n / share for n, share in zip(lengths, shares, strict=True))
    return [max(n, math.ceil(total * share - 1e-9)) for n, share in zip(lengths, shares, strict=True)]


def _same_vocabulary(first: Path | None, second: Path | None) -> bool:
    """Return True if the tokenizers in two folders have the same vocabulary; None matches only None."""
    if first is None or second is None or first == second:
        return first == second
    one, other = first / TOKENIZER, second / TOKENIZER
    return one.read_bytes() == other.read_bytes() or vocabulary(one) == vocabulary(other)
