"""Save checkpoints, optionally in the background. No tensor is gathered, and a checkpoint appears only when complete.

All ranks agree on a writer for each box. Each rank writes its own files. A background save writes from a copy, so that
training can continue. When all ranks have succeeded, rank 0 writes the manifest, every rank reads its files back, and
rank 0 renames the folder. The checkpoint exists only after the rename. If a rank fails, all ranks raise the same error,
and the previous checkpoint remains the newest.

Objects in a bucket cannot be renamed. For a bucket, every rank writes its files to the local copy of the checkpoint
and uploads them. When all ranks are done, rank 0 uploads the manifest. The checkpoint exists only after this upload.
If another process uploads a manifest for this step during the save, the save fails.
"""

import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.boxes import Box, Shard
from crosstrain.checkpoint.files import (
    Reader,
    check_file,
    check_sizes,
    file_sum,
    fsync,
    has_manifest,
    write_file,
    write_safetensors,
)
from crosstrain.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    STATE,
    Files,
    FrozenParameter,
    StoredBox,
    StoredTensor,
    Tensors,
    box_key,
    is_count,
    manifest_text,
    read_json,
)
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.distributed.group import Group
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError, RankLost, StorageError, UserError, first_line
from crosstrain.utils.files import write_json
from crosstrain.utils.logging import log

# ------------------------------------------------------------------------------------ a writer and a file for each box


class Holding(NamedTuple):
    """A box that a rank holds, with the shape and dtype of its logical tensor."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def key(self) -> str:
        """The name of the box in its file."""
        return box_key(self.kind, self.name, self.shape, self.box)


def holdings(shards: list[Shard]) -> dict[Holding, Tensor]:
    """Return this rank's boxes and their data. Raises CheckpointError for a dtype that files cannot store."""
    held = {}
    for shard in shards:
        for piece in shard.pieces:
            if piece.data.dtype not in DTYPES:
                raise CheckpointError(
                    f"{shard.kind} {shard.name}: checkpoints cannot store its dtype, {piece.data.dtype}"
                )
            held[Holding(shard.kind, shard.name, tuple(shard.shape), DTYPES[piece.data.dtype], piece.box)] = piece.data
    return held


def assign(by_rank: list[list[Holding]]) -> dict[Holding, int]:
    """Choose a writer for each distinct box, largest box first: the rank that holds it and has the least to write.

    The choice is deterministic, so every rank computes the same result from the same holdings. Raises CheckpointError
    if ranks disagree about a tensor's shape or dtype.
    """
    holders: dict[Holding, list[int]] = {}
    facts: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    for rank, held in enumerate(by_rank):
        for holding in held:
            kind, name, shape, dtype, _ = holding
            if facts.setdefault((kind, name), (shape, dtype)) != (shape, dtype):
                raise CheckpointError(f"ranks disagree on the shape or dtype of {kind} {name}")
            holders.setdefault(holding, []).append(rank)
    load = [0] * len(by_rank)
    writers = {}
    for holding in sorted(holders, key=lambda h: (-h.box.numel, h.kind, h.name, h.box.offset)):
        writers[holding] = rank = min(holders[holding], key=lambda r: (load[r], r))
        load[rank] += holding.box.numel
    return writers


def file_names(writers: dict[Holding, int], complete: bool) -> dict[Holding, str]:
    """Return the file of every box, in manifest order.

    Each writer has one file for its boxes. If no parameter is sharded, parameters go to separate files, named as in a
    Hugging Face folder. Pass complete=False if the model has parameters that are not in `writers`.
    """
    # If some parameters are sharded or absent, do not write the others as a partial Hugging Face folder.
    whole = complete and all(h.box.shape == h.shape for h in writers if h.kind == "param")
    ranks = sorted({rank for h, rank in writers.items() if h.kind == "param"})
    model = {rank: f"model-{i:05d}-of-{len(ranks):05d}.safetensors" for i, rank in enumerate(ranks, 1)}
    if len(ranks) == 1:
        model[ranks[0]] = "model.safetensors"
    return {
        h: model[writers[h]] if whole and h.kind == "param" else f"training-{writers[h]:05d}.safetensors"
        for h in sorted(writers, key=lambda h: (h.kind, h.name, h.box.offset))
    }


# ------------------------------------------------------------------------------------------------------------- saving


@dataclass
class _Save:
    """The contents of a checkpoint, without this rank's tensors."""

    step: int
    names: dict[Holding, str]  # box -> file
    state: dict[str, Any]
    frozen: dict[str, FrozenParameter]
    pointers: Collection[str]
    keep: Collection[int]


class Checkpointer:
    """Writes the checkpoints of one run under `root`.

    If `run`, the ID of the run, is given, checkpoints of other runs are neither replaced nor deleted. `group` must be a
    separate process group, so that collectives of background saves do not interleave with training's. On
    rank 0, `write_assets(folder, reader)` writes the Hugging Face configuration and any files that are derived from the
    parameters; it may return further entries for state.json. The newest `keep_last` checkpoints (None: all) and all
    checkpoints at multiples of `keep_every` steps are kept.
    """

    def __init__(
        self,
        root: Path,
        group: Group,
        write_assets: Callable[[Path, Reader], dict[str, Any] | None],
        run: str | None = None,
        keep_last: int | None = 3,
        keep_every: int | None = None,
    ) -> None:
        self.root, self.group, self.write_assets, self.run = root, group, write_assets, run
        self.keep_last, self.keep_every = keep_last, keep_every
        self.damaged = set[int]()  # steps of damaged checkpoints that the run skipped
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        if group.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            folders.remove_partial(root)

    def save(
        self,
        step: int,
        shards: list[Shard],
        state: dict[str, Any],
        *,
        frozen: dict[str, FrozenParameter] | None = None,
        pointers: Collection[str] = (),
        keep: Collection[int] = (),
        background: bool = True,
    ) -> None:
        """Start saving, and return once this rank's share is copied. Collective.

        `frozen` parameters are listed in the manifest, but not written; they are not in `shards`. `pointers` names
        pointer files, in addition to "latest", that will point to this checkpoint. The checkpoints of the steps in
        `keep` are not deleted afterwards. With background=False nothing is copied, and the call returns when everything
        is written. A failure of the previous save is not raised here, because the current state should still be saved;
        that failure is already logged.
        """
        self._join()
        mine = holdings(shards)
        writers = assign(self.group.all_gather(list(mine)))
        # Copy, because the optimizer changes these tensors in place while the files are written.
        held = {
            holding: data.to("cpu", copy=True) if background else data
            for holding, data in mine.items()
            if writers[holding] == self.group.rank
        }
        save = _Save(step, file_names(writers, complete=not frozen), state, frozen or {}, pointers, keep)
        if not background:
            return self._write(save, held)
        self._thread = threading.Thread(target=self._write, args=(save, held), name="checkpoint")
        self._thread.start()

    def _write(self, save: _Save, held: dict[Holding, Tensor]) -> None:
        self._error, begun = None, time.monotonic()
        final = folders.step_folder(self.root, save.step)
        temporary = final if storage.origin(final) else self.root / f".{final.name}.tmp"
        try:
            self._together(lambda: self._begin(temporary), by_first=True)
            shares = self._together(lambda: self._write_share(temporary, save, held))
            self._together(lambda: self._complete(temporary, save, shares), by_first=True)
            self._together(lambda: self._check(temporary, shares))
            self._together(lambda: self._publish(temporary, final, save))
        except CheckpointError as problem:
            with suppress(UserError, OSError):
                self._check_own()
                if self.group.rank == 0:
                    folders.remove(temporary)
            self._error = CheckpointError(
                f"checkpoint {storage.origin(final) or final} could not be written: {problem}; "
                f"earlier checkpoints are intact"
            )
        except Exception as error:  # a rank is lost; `wait` raises RankLost unless that rank's error ends the run first
            self._error = RankLost(
                f"{self.root}: the save was aborted ({first_line(error)}); earlier checkpoints are intact"
            )
            self._error.__cause__ = error
        if self.group.rank == 0:
            if self._error is not None:
                log.warning("%s", self._error)
            else:
                log.info("saved %s in %.1f s", storage.origin(final) or final, time.monotonic() - begun)

    def wait(self) -> None:
        """Wait for the save in progress, if any. Raises CheckpointError or RankLost if the last save failed."""
        self._join()
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _together(self, action: Callable[[], Any], by_first: bool = False) -> list[Any]:
        """Run `action` on every rank, or only on rank 0, and return the results of all ranks.

        If the action fails on one rank, all ranks raise CheckpointError.
        """

        def checked() -> Any:
            try:
                self._check_own()
                return action() if self.group.rank == 0 or not by_first else None
            except Exception as error:  # every kind of error has to reach the other ranks
                raise CheckpointError(f"{error} (rank {self.group.rank})") from error

        return self.group.together(checked)

    def _check_own(self) -> None:
        if storage.origin(self.root):
            if self.run is not None and self.group.rank == 0:  # other ranks' local folders may lack the writer's ID
                RunFolder(self.root.parent).check_writer()
        elif self.run is not None and RunFolder(self.root.parent).read_id() != self.run:
            raise CheckpointError(f"{self.root.parent} no longer belongs to this run")

    def _begin(self, temporary: Path) -> None:
        folders.remove(temporary)
        if (url := storage.origin(temporary)) is not None:
            if has_manifest(temporary):
                # If this checkpoint is our own, it is damaged: otherwise the run would have resumed from it.
                folders.check_own(temporary, self.run)
                storage.rename(url, f"{url}.damaged")
            storage.remove(url)
        else:
            # Do not create parents: if the run's folder was moved, its path may now belong to a different run.
            self.root.mkdir(exist_ok=True)
            temporary.mkdir()

    def _write_share(self, temporary: Path, save: _Save, held: dict[Holding, Tensor]) -> dict[str, Any]:
        by_file: dict[str, dict[str, Tensor]] = {}
        for holding, name in save.names.items():
            if holding in held:
                by_file.setdefault(name, {})[holding.key] = held.pop(holding)
        files = {}
        if storage.origin(temporary):
            temporary.mkdir(parents=True, exist_ok=True)  # the local copy may not exist yet
        for name, tensors in by_file.items():
            self._check_own()
            folders.remove(temporary / name)  # a killed run may have left this file here
            files[name] = write_safetensors(temporary / name, tensors)
            self._upload(temporary / name)
        return files

    @staticmethod
    def _upload(path: Path) -> None:
        if (url := storage.origin(path)) is not None:
            storage.upload(path, url)

    def _complete(self, temporary: Path, save: _Save, shares: list[Files]) -> None:
        """Write all files except those in the ranks' shares; the manifest comes last."""
        files = {name: entry for share in shares for name, entry in share.items()}
        if index := {h.key: name for h, name in save.names.items() if name.startswith("model-")}:
            size = sum(files[name]["bytes"] for name in set(index.values()))
            write_json(
                temporary / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index}
            )
        tensors: Tensors = {}
        for h, name in save.names.items():
            stored = tensors.setdefault((h.kind, h.name), StoredTensor(h.shape, h.dtype, []))
            stored.boxes.append(StoredBox(name, h.key, h.box))
        more = self.write_assets(temporary, Reader(temporary, tensors, files))
        write_json(temporary / STATE, save.state | (more or {}))
        for path in temporary.iterdir():
            if path.name not in files:
                fsync(path)
                files[path.name] = file_sum(path)
                self._upload(path)
        listed: dict[str, dict[str, Any]] = {}
        for (kind, key), stored in tensors.items():
            boxes = [[where.file, where.key, where.box.offset, where.box.shape] for where in stored.boxes]
            listed.setdefault(kind, {})[key] = {"shape": stored.shape, "dtype": stored.dtype, "boxes": boxes}
        manifest = manifest_text(
            {
                "files": files,
                "tensors": listed,
                "run": self.run,
                "frozen": {name: asdict(parameter) for name, parameter in save.frozen.items()},
            }
        )
        write_file(temporary / MANIFEST, [manifest])
        fsync(temporary)

    def _check(self, temporary: Path, shares: list[Files]) -> None:
        """Raise CheckpointError unless the files match their checksums. Every rank reads the files that it wrote."""
        mine = shares[self.group.rank]
        if self.group.rank == 0:
            written = Reader.open(temporary).files  # `open` raises an error unless the boxes tile every tensor
            if storage.origin(temporary):
                check_sizes(temporary, written)
            elif strange := {path.name for path in temporary.iterdir()} ^ {MANIFEST, *written}:
                raise CheckpointError(
                    f"{temporary / min(strange)}: present in the folder or in its manifest, but not in both"
                )
            theirs = {name for share in shares[1:] for name in share}
            mine = {name: entry for name, entry in written.items() if name not in theirs} | mine
        for name, entry in mine.items():
            check_file(temporary / name, entry)

    def _publish(self, temporary: Path, final: Path, save: _Save) -> None:
        if (url := storage.origin(final)) is not None:
            for earlier in self.root.glob("step_*"):  # keep only one local copy, for a restart
                if earlier != final:
                    folders.remove(earlier)
        if self.group.rank != 0:
            return
        if url is not None:
            if self.run is not None:
                RunFolder(self.root.parent).copy()  # otherwise, a resume on a new machine would leave a gap in the log
            if not storage.create(storage.join(url, MANIFEST), (final / MANIFEST).read_bytes()):
                raise CheckpointError(f"another process wrote {storage.join(url, MANIFEST)} during the save")
        else:
            if os.path.lexists(final):
                # If this checkpoint is our own, it is damaged: otherwise the run would have resumed from it.
                folders.check_own(final, self.run)
                damaged = final.with_name(f"{final.name}.damaged")
                folders.remove(damaged)
                os.rename(final, damaged)
            os.rename(temporary, final)
            fsync(self.root)
        try:
            for pointer in ("latest", *save.pointers):
                folders.write_pointer(self.root, pointer, save.step)
            self.damaged.discard(save.step)
            folders.prune(self.root, save.step, self.keep_last, self.keep_every, self.run, save.keep, self.damaged)
        except (OSError, StorageError) as error:  # the checkpoint is saved; the next save repeats this cleanup
            log.warning("%s: could not update pointers or delete old checkpoints (%s)", self.root, error)


def load_state(folder: Path) -> dict[str, Any]:
    """Read the JSON state of a checkpoint. Raises CheckpointError unless it is a JSON object with a valid step."""
    state = read_json(folder / STATE, most_bytes=1 << 24)
    if not isinstance(state, dict) or not is_count(state.get("step")):
        raise CheckpointError(f"{folder / STATE}: expected a JSON object with the step of a checkpoint")
    return state
