"""The text of a sample, with the tokens that are learned marked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from crosstrain.data.tokenizer import TextTokenizer
from crosstrain.utils.errors import printable
from crosstrain.utils.types import IGNORE_INDEX, Sample

_GREEN, _DIM, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def marked_text(sample: Sample, tokenizer: TextTokenizer, colour: bool) -> Iterator[str]:
    """Yield a text for each row of a sample: learned tokens in green, or in «» without `colour`.

    A row that starts another document begins with a line that says so.
    """
    rows = sample.get("rows", [sample])
    for number, row in enumerate(rows):
        if len(rows) > 1:
            yield f"--- row {number}"
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        starts = row["position_ids"].tolist() if "position_ids" in row else [1] * len(ids)
        # A label is the token after its place.
        tokens = [(ids[0], False, False)]
        for place, (label, following) in enumerate(zip(labels, [*ids[1:], None], strict=True)):
            learned, begins = label != IGNORE_INDEX, following is not None and starts[place + 1] == 0
            if learned and (begins or following is None):  # the last of its document, which no input holds
                tokens.append((label, True, False))
            if following is not None:
                tokens.append((following, learned and not begins, begins))
        text = ""
        for (learned, begins), group in groupby(tokens, lambda token: token[1:]):
            part = printable(tokenizer.decode([token for token, _, _ in group]))
            if colour:
                part = f"{_GREEN if learned else _DIM}{part}{_PLAIN}"
            elif learned:
                part = f"«{part}»"
            text += f"\n--- next document\n{part}" if begins else part
        yield text
