"""Pack whole documents into sequences of bounded length."""

import bisect
from collections.abc import Sequence

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
