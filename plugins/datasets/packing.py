"""Pack whole documents into sequences of bounded length, and pad sequences to equal length."""

import bisect
from collections.abc import Sequence

import torch

from crosstrain import IGNORE_INDEX, Batch, Sample
from crosstrain.data.shuffle import Permutation

_OPEN = 512  # maximum number of sequences that can still take documents


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the document indices of each sequence, packed by best fit: a document goes where it leaves the least room.

    Documents are placed in a fixed shuffled order. If more than 512 sequences are open, the fullest is closed.
    lengths: number of tokens of each document, at most `capacity`.
    """
    sequences: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, sequence) of the open sequences, sorted
    for document in map(Permutation(max(len(lengths), 1), 0), range(len(lengths))):
        length = lengths[document]
        assert 0 < length <= capacity
        at = bisect.bisect_left(rooms, (length, 0))
        if at < len(rooms):
            room, sequence = rooms.pop(at)
        else:
            room, sequence = capacity, len(sequences)
            sequences.append([])
        sequences[sequence].append(document)
        if room > length:
            bisect.insort(rooms, (room - length, sequence))
            if len(rooms) > _OPEN:
                rooms.pop(0)
    return sequences


def padded_rows(rows: list[Sample], most: int | None = None) -> Batch:
    """Right-pad rows of arrays [length] to equal length, with IGNORE_INDEX in `labels` and 0 in the other arrays.

    For tensor cores and sequence parallelism, the length is rounded up to a multiple of 8, but not above `most`.
    The padding is a separate document: its position_ids restart, unless the rows have `segments`.
    """
    longest = max(len(row["input_ids"]) for row in rows)
    rounded = -(-longest // 8) * 8
    longest = rounded if most is None else max(longest, min(rounded, most))
    batch = {key: torch.zeros(len(rows), longest, dtype=torch.long) for key in rows[0]}
    batch["labels"].fill_(IGNORE_INDEX)
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        for key, values in row.items():
            batch[key][number, :length] = torch.from_numpy(values)
        if "position_ids" in row and "segments" not in row:
            batch["position_ids"][number, length:] = torch.arange(longest - length)
    return batch
