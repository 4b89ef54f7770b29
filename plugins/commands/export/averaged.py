"""The mean of a run's last checkpoints, as one checkpoint to read."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from crosstrain import Piece, Shard, UserError
from crosstrain.checkpoint import folders
from crosstrain.checkpoint.files import Reader


class AveragedReader(Reader):
    """The last of several checkpoints, with the mean of their floating-point values (LAWA, Kaddour, 2022)."""

    def __init__(self, readers: list[Reader]) -> None:
        vars(self).update(vars(readers[-1]))
        self._readers = readers

    def fill(self, shards: Iterable[Shard]) -> None:
        """Fill every piece with the mean, which is computed in double precision."""
        for shard in shards:
            for piece in shard.pieces:
                values = []
                for reader in self._readers if piece.data.is_floating_point() else self._readers[-1:]:
                    values.append(torch.empty(piece.data.shape, dtype=torch.float32))
                    reader.fill([replace(shard, pieces=[Piece(piece.box, values[-1])])])
                piece.data.copy_(torch.stack(values).double().mean(0))


def averaged(checkpoint: Path, count: int, weights: str | None) -> Reader:
    """Open the newest `count` checkpoints of a run up to `checkpoint`. Raises UserError if there are fewer."""
    root = checkpoint.parent
    paths = [folders.step_folder(root, step) for step in folders.steps(root)]
    found = paths[: paths.index(checkpoint) + 1][-count:] if checkpoint in paths else []
    if len(found) < count:
        raise UserError(
            f"--average: {root} has {len(found)} checkpoints up to {checkpoint.name}, not {count}; run.keep_last sets "
            f"how many are kept"
        )
    readers = [Reader.open(folders.verified(path).folder, weights) for path in found]
    if any(reader.names("param") != readers[-1].names("param") for reader in readers):
        raise UserError(f"--average: the last {count} checkpoints in {root} have different parameters")
    return AveragedReader(readers)
