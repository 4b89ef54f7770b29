"""Preference data for `run.objective`: chosen and rejected answers, or answers labelled good or bad."""

from dataclasses import dataclass

import numpy as np
import torch

from crosstrain import IGNORE_INDEX, Batch, DataError, Sample, Split, registry

from .chat import ConversationDataset, ConversationOptions
from .packing import padded_rows


@registry.register_dataset("preference")
class Preference(ConversationDataset):
    """Conversations with a chosen and a rejected last answer; only the answer's tokens are targets.

    A sample has two rows. With `pairs`, the rows end with the chosen and the rejected answer. Without `pairs`, the
    first row ends with an answer, and the second row is the same prompt with the next conversation's answer.
    `preferred` [rows] is 1 for a good answer, -1 for a bad answer and 0 for the next conversation's answer.
    `reference` [rows] has the log-probabilities under the reference model.
    """

    @dataclass
    class Options(ConversationOptions):
        """Conversation options, and the pairing of answers."""

        pairs: bool = True  # True: chosen and rejected answers (dpo, orpo); False: single answers, good or bad (kto)

    options: Options
    preferences = True

    @classmethod
    def shapes(cls, options: Options) -> Batch:
        ids = torch.zeros(2, options.seq_length, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids, "preferred": ids[:, 0], "reference": torch.zeros(2, device="meta")}

    def __init__(self, options: Options, split: Split) -> None:
        self.row_documents = 2 if options.pairs else 1
        super().__init__(options, split)
        self.row_layout = "pairs" if options.pairs else "single answers"
        answers = np.fromfile(self.folder / "answers.bin", np.uint8)
        if options.pairs and (answers > 1).any():
            raise DataError(
                f"{options.path}: some rows have one answer with a label; set pairs: false to train with kto"
            )
        self.answers = answers[self.start : self.start + self.count]
        self.digest = f"{self.folder.name}-{self.start}-{self.count}-{options.pairs}"

    def numbers(self, index: int) -> list[int]:
        return [2 * index, 2 * index + 1] if self.options.pairs else [index]

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        if self.options.pairs:
            rows, kinds = [self.tokens(number) for number in self.numbers(index)], [1, -1]
        else:
            rows = [self.tokens(index), self._mismatched(index)]
            kinds = [1 if self.answers[index] & 1 else -1, 0]
        sample: Sample = {
            "rows": [{"input_ids": ids[:-1], "labels": targets[1:]} for ids, targets in rows],
            "preferred": np.array(kinds),
        }
        if self.reference is not None:
            sample["reference"] = self.reference[index]
        return sample

    def _mismatched(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a prompt followed by the next conversation's answer, truncated to seq_length."""
        ids, targets = self.tokens(index)
        after = 2 if self.answers[index] == 1 else 1  # a pair's rejected answer comes right after its good one
        others, other_targets = self.tokens((index + after) % self.count)
        prompt = int((targets != IGNORE_INDEX).argmax())
        answer = int((other_targets != IGNORE_INDEX).argmax())
        most = self.options.seq_length + 1
        return (
            np.concatenate([ids[:prompt], others[answer:]])[:most],
            np.concatenate([np.full(prompt, IGNORE_INDEX), other_targets[answer:]])[:most],
        )

    def collate(self, samples: list[Sample]) -> Batch:
        batch = padded_rows([row for sample in samples for row in sample["rows"]], self.options.seq_length)
        for key in samples[0].keys() - {"rows"}:
            batch[key] = torch.from_numpy(np.concatenate([sample[key] for sample in samples]))
        return batch
