"""Prompts with reference answers, for objectives that sample answers while they train."""

from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from crosstrain import IGNORE_INDEX, Batch, DataError, Sample, SampleError, os_errors_as, registry

from ..commands.prepare.chat_template import ChatTemplate, refuse_if
from .chat import ConversationDataset

_TURNS = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@registry.register_dataset("prompts")
class Prompts(ConversationDataset):
    """Conversations whose last assistant turn is the reference answer; everything before it is the prompt.

    A sample has the tokens of the prompt, `input_ids` [length], and of the reference answer, `answer`. Objectives get
    the batches of `collate`, and call `texts` and `reply`.
    """

    row_layout = "prompts"

    @classmethod
    def shapes(cls, options: Any) -> Batch:
        return {"input_ids": torch.zeros(1, options.seq_length - 1, dtype=torch.int64, device="meta")}

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        ids, targets = self.tokens(index)
        first = int((targets != IGNORE_INDEX).argmax())
        return {"input_ids": ids[:first], "answer": ids[first:]}

    def collate(self, samples: list[Sample]) -> Batch:
        """Return `input_ids` and `answer`, each [rows, longest]; shorter rows end with IGNORE_INDEX."""
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_value=IGNORE_INDEX)
        return {key: pad([torch.from_numpy(sample[key]) for sample in samples]) for key in ("input_ids", "answer")}

    def texts(self, rows: list[list[int]]) -> list[str]:
        """Decode rows of tokens, without special tokens."""
        return self.tokenizer.decode_batch(rows, words=True)

    @cached_property
    def _template(self) -> ChatTemplate:
        assert self.tokenizer_path is not None
        return ChatTemplate(self.tokenizer_path)

    def reply(self, role: str, text: str) -> list[int]:
        """Return the tokens from the end of an assistant's turn to the start of its next turn, around a turn of `role`.

        Raises SampleError if the text contains a special token, and DataError if the template does not take the turn.
        """
        template, turn = self._template, {"role": role, "content": text}
        template.check([turn], None)
        with os_errors_as(
            DataError, f"chat_template: it takes no turn of the role {role} after an answer", SampleError
        ):
            before, spans, _ = template.located(_TURNS, None)
            whole, stop = template.render([*_TURNS, turn], answering=True), spans[0][1]
            refuse_if(whole[:stop] != before[:stop], "it renders earlier turns differently when a turn follows")
        return template.tokens(whole[stop:], [])[0]
