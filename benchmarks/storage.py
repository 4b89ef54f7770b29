"""Save and load a checkpoint, and write and read the same number of bytes as plain files in the same folder.

A rank of a `turns.Contestant` runs `storage`. Orders: "save", "write", "load", "read", and "evict", to remove the
written files from the page cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from turns import Line

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.checkpointer import Checkpointer
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.load_weights import load_shards
from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model, make_runner


def _move(move: Callable[[memoryview], int | None], data: memoryview) -> None:
    """Move all of `data` with a raw `write` or `readinto`; each call may move only a part."""
    while data:
        data = data[move(data) or 0 :]


def storage(line: Line, project: str, options: list[str]) -> None:
    """Carry out orders; report the seconds, and the total bytes of all ranks."""
    config = load_config(project, options)
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, None, for_training=True)
    rank, size = runner.world.rank, runner.world.size
    folder = Path(config.run.output_dir)
    # The earlier checkpoint is deleted while the next one is saved, as in a run.
    keeper = Checkpointer(
        folder, runner.world.twin(), lambda path, _: runner.model.export.save_config(path), keep_last=1
    )
    held = sum(piece.data.numel() * piece.data.element_size() for s in runner.held.shards() for piece in s.pieces)
    everything = runner.world.all_reduce_sum(held)[0]
    step, checkpoint, saved = 0, folder, 0.0
    plain = [folder / f"plain-{r}" for r in range(size)]
    content, room = memoryview(b""), bytearray(held)

    def save() -> None:
        keeper.save(step, runner.held.shards(), {"step": step})
        keeper.wait()

    def write() -> None:
        """Write a new file, then replace the old file: a save also keeps the old checkpoint until it is done."""
        new = plain[rank].with_suffix(".new")
        with open(new, "xb", buffering=0) as file:
            _move(file.write, content)
            os.fsync(file.fileno())
        os.replace(new, plain[rank])

    def load() -> None:
        load_shards(Reader.open(checkpoint), runner.held.shards())

    def read() -> None:
        """Read as many bytes as this rank's state has, beginning with this rank's plain file."""
        free = memoryview(room)
        for path in plain[rank:] + plain[:rank]:
            part = free[: path.stat().st_size]
            with open(path, "rb", buffering=0) as file:
                _move(file.readinto, part)
            free = free[len(part) :]

    def evict() -> None:
        for path in [*plain, *checkpoint.iterdir()]:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    actions: dict[str, Callable[[], None]] = {f.__name__: f for f in (save, write, load, read, evict)}
    line.report({})
    while (order := line.order()) is not None:
        if order == "save":
            step += 1
        elif order == "write" and not content:
            content = memoryview(np.random.default_rng(rank).bytes(round(saved / size)))
        runner.world.barrier()
        started = time.perf_counter()
        actions[order]()
        seconds = time.perf_counter() - started
        if order == "save":
            checkpoint = folders.step_folder(folder, step)
            saved = sum(path.stat().st_size for path in checkpoint.iterdir())
        moved = {"save": saved, "write": saved, "load": everything, "read": everything, "evict": 0.0}[order]
        line.report({"seconds": seconds, "bytes": moved})
    runner.close()
