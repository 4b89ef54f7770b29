"""The folder of a run's checkpoints: list them, find the newest intact one, delete old ones."""

import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from crosstrain.checkpoint.files import Reader, fetch_manifest, fsync, has_manifest
from crosstrain.checkpoint.manifest import MANIFEST, RUN_ID, STATE, IncompatibleCheckpointError, read_json
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError
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
    try:
        if (url := storage.origin(root)) is not None:
            names = [name.removesuffix(f"/{MANIFEST}") for name in storage.files(url) if name.endswith(f"/{MANIFEST}")]
        else:
            names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from None
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def remove_partial(root: Path) -> None:
    """Delete the remains of interrupted saves under `root`. No other process may be writing to the run."""
    for path in root.glob(".*.tmp"):
        remove(path)
    if (url := storage.origin(root)) is not None:
        whole = steps(root)
        for name in storage.listing(url):
            if (match := _STEP.fullmatch(name)) and int(match[1]) not in whole:
                log.warning("%s/%s: deleted, as it has no %s and so is no whole checkpoint", url, name, MANIFEST)
                storage.remove(storage.join(url, name))


def run_of(folder: Path) -> str | None:
    """Return the ID of the run that wrote a checkpoint.

    Returns None for a damaged checkpoint, or for one from a release that stored no ID.
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
    """Return the run ID of the newest checkpoint that has one."""
    return next((run for step in reversed(steps(root)) if (run := run_of(step_folder(root, step)))), None)


def check_own(folder: Path, run: str | None) -> None:
    """Raise CheckpointError if a run other than `run` wrote the checkpoint. With `run=None`, any run is accepted."""
    if run is not None and run_of(folder) not in (None, run):
        raise CheckpointError(
            f"{folder} is another run's checkpoint and is left alone; move it elsewhere, and name it there as "
            f"run.resume_from to go on from it, or let --fresh start over in a new folder"
        )


def write_pointer(root: Path, name: str, step: int) -> None:
    """Write the pointer file `name` ("latest" or "best"). It holds the name of a step's folder."""
    text = step_folder(root, step).name + "\n"
    if (url := storage.origin(root)) is not None:
        return storage.write(storage.join(url, name), text.encode())
    write_atomically(root / name, text)
    fsync(root)


def read_pointer(root: Path, name: str) -> int | None:
    """Return the step in the pointer file `name`, if the file and the step's folder exist."""
    url = storage.origin(root)
    try:
        # The file may not be a pointer, so limit the bytes that are read.
        there = storage.join(url, name) if url else ""
        text = storage.read_end(there, 100, first=True) if url else read_regular(root / name, 100, follow=False)
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
        if path.is_dir() and not path.is_symlink():  # rmtree would block on a FIFO until somebody opens it for writing
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

    The newest `keep_last` are kept (None: all), and multiples of `keep_every` steps. The best checkpoint, the steps in
    `keep` and the `damaged` ones are never deleted. Damaged checkpoints do not count towards `keep_last`. Checkpoints
    of other runs, and later steps (damaged ones that this run skipped), are neither counted nor deleted.
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
                storage.remove(storage.join(url, MANIFEST))  # first: without a manifest the checkpoint does not exist
                storage.remove(url)
            else:
                # Rename first, so that a kill during the deletion leaves no folder that looks like a checkpoint.
                doomed = root / f".{folder.name}.tmp"
                os.rename(folder, doomed)
                remove(doomed)


def verified(folder: Path, whole: bool = True, share: tuple[int, int] | None = None) -> Reader:
    """Open a checkpoint. If `whole`, check its files with `Reader.verify`.

    For a bucket, fetch the manifest and the files without tensors again.
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
    """Return the newest intact checkpoint, and a sentence for each newer, damaged one.

    `check` raises CheckpointError for a damaged checkpoint. Raises CheckpointError if a run other than `run` wrote the
    checkpoint that is found. With `run=None`, any run is accepted.
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
        log.warning("damaged checkpoint passed over: %s", problem)


def find_checkpoint(place: str | Path, check: Callable[[Path], object] = verified) -> Path:
    """Find a checkpoint: `place` itself, or the newest intact one in a run's folder or its `checkpoints/`.

    `place` may also be a URL, in which case the path of the local copy is returned, or a pointer file such as
    `checkpoints/best`. `check` is as for `newest_valid`. Damaged checkpoints are logged. Raises CheckpointError if
    there is no intact checkpoint.
    """
    path = storage.local(place)
    if (url := storage.origin(path)) is None and not os.path.lexists(path):
        raise CheckpointError(missing(path, [path]))
    if not has_manifest(path) and (step := read_pointer(path.parent, path.name)) is not None:
        path = step_folder(path.parent, step)
    if path.is_file():
        raise CheckpointError(f"{path}: {foreign_weights(path) or 'not a checkpoint, and names none beside it'}")
    if has_manifest(path):
        check(path)
        return _plain(path)
    for root in (path, path / "checkpoints"):
        folder, damaged = newest_valid(root, check=check)
        warn_of(damaged)
        if folder is not None:
            return _plain(folder)
        if damaged:
            raise CheckpointError(f"{root}: no undamaged checkpoint ({damaged[0]})")
    said = "not a checkpoint, and holds none; name a run's folder or checkpoints/step_…"
    if is_hugging_face(path):
        said = "not a checkpoint but a Hugging Face folder, whose weights model.pretrained takes"
    raise CheckpointError(f"{url or path}: {lone_adapter(path, place) or foreign_weights(path) or said}")


def is_hugging_face(folder: Path) -> bool:
    """Return True for a Hugging Face model folder that is not also a checkpoint, a partial one or a run's folder."""
    ours = (MANIFEST, STATE, "checkpoints")
    return (folder / "config.json").is_file() and not any(os.path.lexists(folder / own) for own in ours)


def _plain(folder: Path) -> Path:
    """Return `folder`. Raises CheckpointError if any entry is a link, device, socket or FIFO."""
    for entry in os.scandir(folder):
        if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            raise CheckpointError(f"{entry.path}: not a regular file, and a checkpoint has no others")
    return folder
