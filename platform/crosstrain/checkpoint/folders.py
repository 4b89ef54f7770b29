"""The folder of a run's checkpoints: list them, find the newest intact one, delete old ones."""

import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from crosstrain.checkpoint.bucket import fetch_manifest, has_manifest
from crosstrain.checkpoint.files import Reader, fsync
from crosstrain.checkpoint.manifest import MANIFEST, STATE, IncompatibleCheckpointError, read_json
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError
from crosstrain.utils.files import open_regular, write_atomically
from crosstrain.utils.foreign_weights import foreign_weights, lone_adapter
from crosstrain.utils.logging import log
from crosstrain.utils.paths import missing

_STEP = re.compile(r"step_([0-9]{6,18})")
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints under `root`, also damaged ones. CheckpointError if it cannot be read."""
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
    """Delete what interrupted saves left under the `root` of a run that this process alone writes to."""
    for path in root.glob(".*.tmp"):
        remove(path)
    if (url := storage.origin(root)) is not None:
        whole = steps(root)
        for name in storage.listing(url):
            if (match := _STEP.fullmatch(name)) and int(match[1]) not in whole:
                log.warning("%s/%s: deleted, as it has no %s and so is no whole checkpoint", url, name, MANIFEST)
                storage.remove(storage.join(url, name))


def run_of(folder: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None for an earlier release's or a damaged one."""
    path = folder / MANIFEST
    try:
        if storage.origin(folder) and not path.exists():
            fetch_manifest(folder)
        return _run_of(path, path.stat().st_mtime_ns)
    except (OSError, CheckpointError):
        return None


@lru_cache(maxsize=1024)  # a large manifest takes a second to parse
def _run_of(manifest: Path, _modified: int) -> str | None:
    document = read_json(manifest)
    run = document.get("run") if isinstance(document, dict) else None
    return run if isinstance(run, str) and _RUN_ID.fullmatch(run) else None


def newest_run(root: Path) -> str | None:
    """Return the id of the run that wrote the newest checkpoint that has one."""
    return next((run for step in reversed(steps(root)) if (run := run_of(step_folder(root, step)))), None)


def check_own(folder: Path, run: str | None) -> None:
    """Raise CheckpointError if another run than `run` (None: any) wrote the checkpoint."""
    if run is not None and run_of(folder) not in (None, run):
        raise CheckpointError(
            f"{folder} is another run's checkpoint and is left alone; move it elsewhere, and name it there as "
            f"run.resume_from to go on from it, or let --fresh start over in a new folder"
        )


def write_pointer(root: Path, name: str, step: int) -> None:
    """Write the pointer file `name` ("latest", "best"), which holds the name of a step's folder."""
    text = step_folder(root, step).name + "\n"
    if (url := storage.origin(root)) is not None:
        return storage.write(storage.join(url, name), text.encode())
    write_atomically(root / name, text)
    fsync(root)


def read_pointer(root: Path, name: str) -> int | None:
    """Return the step that the pointer file `name` means, if it and the folder exist."""
    url = storage.origin(root)
    try:
        if url is not None:
            text = storage.read_end(storage.join(url, name), 100, first=True)
        else:
            with open_regular(root / name, follow=False) as file:
                text = file.read(100)  # it may be no pointer, and of any size
        match = _STEP.fullmatch(text.decode("ascii").strip())
    except (OSError, UnicodeDecodeError):
        return None
    if match is None:
        return None
    folder = step_folder(root, int(match[1]))
    return int(match[1]) if (has_manifest(folder) if url else folder.is_dir()) else None


def remove(path: Path) -> None:
    """Delete a folder, or a file or link of that name, as far as possible."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():  # rmtree would wait for whoever writes to a FIFO
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


@dataclass
class Retention:
    """Rule for the checkpoints to keep: the newest `keep_last` (None: all), and multiples of `keep_every` steps."""

    keep_last: int | None = 3
    keep_every: int | None = None


def prune(
    root: Path, newest: int, retention: Retention, run: str | None, keep: Collection[int] = (),
    damaged: Collection[int] = (),
) -> None:  # fmt: skip
    """Delete checkpoints of `run` up to step `newest`, the one just written, that are not to be kept.

    Spares the best one, those of the steps `keep`, and the `damaged` ones, which do not count. Other runs' checkpoints
    and later steps, which are damaged ones that this run has passed over, neither count nor go.
    """
    if retention.keep_last is None:
        return
    spared = {read_pointer(root, "best"), *keep}
    found = [s for s in steps(root) if s <= newest and s not in damaged]
    own = [s for s in found if run is None or run_of(step_folder(root, s)) in (None, run)]
    for step in own[: -retention.keep_last]:
        if step not in spared and not (retention.keep_every and step % retention.keep_every == 0):
            folder = step_folder(root, step)
            if (url := storage.origin(folder)) is not None:
                remove(folder)
                storage.remove(storage.join(url, MANIFEST))  # first: without it there is no checkpoint
                storage.remove(url)
                continue
            # Renamed first, so that a kill half-way leaves no folder that looks like a checkpoint.
            doomed = root / f".{folder.name}.tmp"
            os.rename(folder, doomed)
            remove(doomed)


def verified(folder: Path, whole: bool = True, share: tuple[int, int] | None = None) -> Reader:
    """Open a checkpoint and, if `whole`, check its files as `Reader.verify` does. A bucket's manifest is read anew."""
    if storage.origin(folder) is not None:
        fetch_manifest(folder)
    reader = Reader.open(folder)
    if whole:
        reader.verify(share)
    return reader


def newest_valid(
    root: Path, run: str | None = None, check: Callable[[Path], object] = verified
) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint, and a sentence for each damaged newer one, which is also logged.

    `check` raises CheckpointError for a damaged one. Raises CheckpointError where another run than `run` (None: any)
    wrote it.
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
            log.warning("damaged checkpoint passed over: %s", error)
        else:
            check_own(folder, run)
            return folder, damaged
    return None, damaged


def find_checkpoint(place: str | Path, check: Callable[[Path], object] = verified) -> Path:
    """Find a checkpoint: `place` itself, or the newest intact one of a run's folder or its `checkpoints/`.

    It may be a URL, for which the local copy's path is returned, and a pointer file, such as `checkpoints/best`.
    `check` is as for `newest_valid`. Raises CheckpointError where there is none.
    """
    path = storage.local(place)
    if (url := storage.origin(path)) is not None:
        if not has_manifest(path) and (step := read_pointer(path.parent, path.name)) is not None:
            path = step_folder(path.parent, step)
    elif not os.path.lexists(path):
        raise CheckpointError(missing(path, [path]))
    elif path.is_file():
        if (step := read_pointer(path.parent, path.name)) is None:
            raise CheckpointError(f"{path}: {foreign_weights(path) or 'not a checkpoint, and names none beside it'}")
        path = step_folder(path.parent, step)
    if has_manifest(path):
        check(path)
        return _plain(path)
    for root in (path, path / "checkpoints"):
        folder, damaged = newest_valid(root, check=check)
        if folder is not None:
            return _plain(folder)
        if damaged:
            raise CheckpointError(f"{root}: no undamaged checkpoint ({damaged[0]})")
    said = "not a checkpoint, and holds none; name a run's folder or checkpoints/step_…"
    if is_hugging_face(path):
        said = "not a checkpoint but a Hugging Face folder, whose weights model.pretrained takes"
    raise CheckpointError(f"{url or path}: {lone_adapter(path, place) or foreign_weights(path) or said}")


def is_hugging_face(folder: Path) -> bool:
    """Return True for a Hugging Face model folder that is no checkpoint, whole or in part, and no run's folder."""
    ours = (MANIFEST, STATE, "checkpoints")
    return (folder / "config.json").is_file() and not any(os.path.lexists(folder / own) for own in ours)


def _plain(folder: Path) -> Path:
    """Return `folder`; raises CheckpointError where anything in it is a link, a device, a socket or a FIFO."""
    for entry in os.scandir(folder):
        if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            raise CheckpointError(f"{entry.path}: not a regular file, and a checkpoint has no others")
    return folder
