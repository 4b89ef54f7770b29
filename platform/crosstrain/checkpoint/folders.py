"""The folder of a run's checkpoints: list them, find the newest intact one, delete old ones."""

import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from crosstrain.checkpoint.files import Reader, fetch_manifest, fsync, has_manifest
from crosstrain.checkpoint.manifest import MANIFEST, STATE, IncompatibleCheckpointError, read_json
from crosstrain.checkpoint.run_folder import RUN_ID
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError, os_errors_as
from crosstrain.utils.files import read_regular, write_atomically
from crosstrain.utils.foreign_weights import foreign_weights, lone_adapter
from crosstrain.utils.logging import log
from crosstrain.utils.paths import missing

_STEP = re.compile(r"step_([0-9]{6,18})")


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints under `root`, including damaged ones.

    Raises CheckpointError if `root` cannot be read.
    """
    names: list[str] = []
    with os_errors_as(CheckpointError, f"{root}: cannot be read"), suppress(FileNotFoundError, NotADirectoryError):
        if (url := storage.origin(root)) is not None:
            names = [name.removesuffix(f"/{MANIFEST}") for name in storage.files(url) if name.endswith(f"/{MANIFEST}")]
        else:
            names = os.listdir(root)
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def remove_partial(root: Path) -> None:
    """Delete the remains of interrupted saves under `root`. No other process may write to the run meanwhile."""
    for path in root.glob(".*.tmp"):
        remove(path)
    if (url := storage.origin(root)) is not None:
        whole = steps(root)
        for name in storage.listing(url):
            if (match := _STEP.fullmatch(name)) and int(match[1]) not in whole:
                log.warning("%s/%s: deleted this incomplete checkpoint, which has no %s", url, name, MANIFEST)
                storage.remove(storage.join(url, name))


def run_of(folder: Path) -> str | None:
    """Return the ID of the run that wrote a checkpoint.

    Returns None if the checkpoint is damaged, or is from an early release that stored no ID.
    """
    path = folder / MANIFEST
    try:
        if storage.origin(folder) and not path.exists():
            fetch_manifest(folder)
        return _run_of(path, path.stat().st_mtime_ns)
    except (OSError, CheckpointError):
        return None


@lru_cache(maxsize=1024)  # parsing a large manifest takes a second
def _run_of(manifest: Path, _modified: int) -> str | None:
    document = read_json(manifest)
    run = document.get("run") if isinstance(document, dict) else None
    return run if isinstance(run, str) and RUN_ID.fullmatch(run) else None


def newest_run(root: Path) -> str | None:
    """Return the run ID in the newest checkpoint that contains a run ID."""
    return next((run for step in reversed(steps(root)) if (run := run_of(step_folder(root, step)))), None)


def check_own(folder: Path, run: str | None) -> None:
    """Raise CheckpointError if a run other than `run` wrote the checkpoint. With `run=None`, any run is accepted."""
    if run is not None and run_of(folder) not in (None, run):
        raise CheckpointError(
            f"{folder} is a checkpoint of a different run; move it elsewhere and set run.resume_from to its new path "
            f"to continue from it, or start over in a new folder with --fresh"
        )


def write_pointer(root: Path, name: str, step: int) -> None:
    """Write the pointer file `name` ("latest" or "best"). The file contains the name of the step's folder."""
    text = step_folder(root, step).name + "\n"
    if (url := storage.origin(root)) is not None:
        return storage.write(storage.join(url, name), text.encode())
    write_atomically(root / name, text)
    fsync(root)


def read_pointer(root: Path, name: str) -> int | None:
    """Return the step in the pointer file `name`; None if there is no such file, or no folder for the step."""
    url = storage.origin(root)
    try:
        # The file might not be a pointer, so limit the number of bytes that are read.
        text = (
            storage.read_end(storage.join(url, name), 100, first=True)
            if url
            else read_regular(root / name, 100, follow=False)
        )
        match = _STEP.fullmatch(text.decode("ascii").strip())
    except (OSError, UnicodeDecodeError):
        return None
    if match is None:
        return None
    folder = step_folder(root, int(match[1]))
    return int(match[1]) if (has_manifest(folder) if url else folder.is_dir()) else None


def remove(path: Path) -> None:
    """Delete a folder, file or link. Errors are ignored."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():  # rmtree would block on a FIFO until a process opens the FIFO
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def prune(
    root: Path,
    newest: int,
    keep_last: int | None,
    keep_every: int | None,
    run: str | None,
    keep: Collection[int],
    damaged: Collection[int],
) -> None:
    """Delete checkpoints of `run` up to `newest`, the step just saved.

    The newest `keep_last` checkpoints (None: all) and all checkpoints at multiples of `keep_every` steps are kept. The
    best checkpoint and the checkpoints of the steps in `keep` and `damaged` are never deleted. Damaged checkpoints do
    not count towards `keep_last`. Checkpoints of other runs, and of steps after `newest` (damaged checkpoints that this
    run skipped), are neither counted nor deleted.
    """
    if keep_last is None:
        return
    spared = {read_pointer(root, "best"), *keep}
    found = [s for s in steps(root) if s <= newest and s not in damaged]
    own = [s for s in found if run is None or run_of(step_folder(root, s)) in (None, run)]
    for step in own[:-keep_last]:
        if step not in spared and not (keep_every and step % keep_every == 0):
            folder = step_folder(root, step)
            if (url := storage.origin(folder)) is not None:
                remove(folder)
                storage.remove(storage.join(url, MANIFEST))  # first, because the manifest marks a complete checkpoint
                storage.remove(url)
            else:
                # Rename first, so that a kill during the deletion leaves no folder that looks like a checkpoint.
                doomed = root / f".{folder.name}.tmp"
                os.rename(folder, doomed)
                remove(doomed)


def verified(folder: Path, whole: bool = True, share: tuple[int, int] | None = None) -> Reader:
    """Open a checkpoint. If `whole`, check its files with `Reader.verify`.

    For a checkpoint in a bucket, this fetches the manifest again, and other files only if the local copies differ.
    """
    if storage.origin(folder) is not None:
        fetch_manifest(folder)
    reader = Reader.open(folder)
    if whole:
        reader.verify(share)
    else:
        reader.fetch_small()
    return reader


def newest_valid(
    root: Path, run: str | None = None, check: Callable[[Path], object] = verified
) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint, and a sentence about each damaged checkpoint that is newer.

    `check` raises CheckpointError for a damaged checkpoint. Raises CheckpointError if a run other than `run` wrote the
    intact checkpoint. With `run=None`, any run is accepted.
    """
    damaged: list[str] = []
    for step in reversed(steps(root)):
        folder = step_folder(root, step)
        try:
            check(folder)
        except IncompatibleCheckpointError:
            raise
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            check_own(folder, run)
            return folder, damaged
    return None, damaged


def warn_of(damaged: list[str]) -> None:
    """Log the sentences about damaged checkpoints that `newest_valid` returns."""
    for problem in damaged:
        log.warning("skipping a damaged checkpoint: %s", problem)


def find_checkpoint(place: str | Path, check: Callable[[Path], object] = verified) -> Path:
    """Find a checkpoint: `place` itself, or the newest intact checkpoint in `place` or in its `checkpoints/`.

    `place` may also be a pointer file such as `checkpoints/best`, or a URL. For a URL, this returns the path of the
    local copy. `check` raises CheckpointError for a damaged checkpoint. Damaged checkpoints are logged. Raises
    CheckpointError if there is no intact checkpoint.
    """
    path = storage.local(place)
    if (url := storage.origin(path)) is None and not os.path.lexists(path):
        raise CheckpointError(missing(path, [path]))
    if not has_manifest(path) and (step := read_pointer(path.parent, path.name)) is not None:
        path = step_folder(path.parent, step)
    if path.is_file():
        said = "neither a checkpoint nor a pointer to one; weights of other programs are for model.pretrained"
        raise CheckpointError(f"{path}: {foreign_weights(path) or said}")
    if has_manifest(path):
        check(path)
        return _plain(path)
    for root in (path, path / "checkpoints"):
        folder, damaged = newest_valid(root, check=check)
        warn_of(damaged)
        if folder is not None:
            return _plain(folder)
        if damaged:
            raise CheckpointError(f"{root}: every checkpoint is damaged ({damaged[0]})")
    said = "not a checkpoint, and contains none; expected a run's folder or checkpoints/step_…"
    if is_hugging_face(path):
        said = "a Hugging Face folder, not a checkpoint; load its weights with model.pretrained"
    raise CheckpointError(f"{url or path}: {lone_adapter(path, place) or foreign_weights(path) or said}")


def is_hugging_face(folder: Path) -> bool:
    """Return True for a Hugging Face model folder that is neither a run folder nor a complete or partial checkpoint."""
    ours = (MANIFEST, STATE, "checkpoints")
    return (folder / "config.json").is_file() and not any(os.path.lexists(folder / own) for own in ours)


def _plain(folder: Path) -> Path:
    """Return `folder`. Raises CheckpointError if any entry is a link, device, socket or FIFO."""
    for entry in os.scandir(folder):
        if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            raise CheckpointError(f"{entry.path}: not a regular file or folder; a checkpoint may contain nothing else")
    return folder
