"""A dataset that computes its samples."""

from dataclasses import dataclass

import numpy as np

from crosstrain import Dataset, PositiveInt, Sample, Split, registry

SHARES = {"train": (0.0, 0.9), "val": (0.9, 0.95), "test": (0.95, 1.0)}  # shares of all progressions


@registry.register_dataset("example")
class ExampleDataset(Dataset):
    """Arithmetic progressions modulo a number."""

    @dataclass
    class Options:
        length: PositiveInt = 32  # tokens per sample
        modulus: PositiveInt = 97  # token IDs are below this number

    def __init__(self, options: Options, split: Split) -> None:
        super().__init__(options, split)
        self.vocab_size, self.sequence_length = options.modulus, options.length
        self.first, self.last = (round(share * options.modulus**2) for share in SHARES[split])

    def __len__(self) -> int:
        return self.last - self.first

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        step, start = divmod(self.first + index, self.options.modulus)
        tokens = (start + step * np.arange(self.options.length + 1)) % self.options.modulus
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}
