"""Turn documents into a folder of tokens that datasets of type `text` can open.

tokens.bin, tokens.idx   Megatron's format; every document ends with the tokenizer's end-of-text token
tokenizer/               a Hugging Face tokenizer folder
dataset.json             summary, with the options
report.json              counts of documents read, kept and dropped, with reasons; lengths of documents
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from crosstrain import DataError, cache_folder
from crosstrain.utils import storage

from ...datasets.prepared import Summary, locate, locate_remote
from .options import PrepareOptions
from .shards import key_of


def prepare(
    options: PrepareOptions, output: str | Path, progress: bool = True, *, overwrite: bool = False, wait: bool = False
) -> Summary:
    """Create folder `output` atomically, and return its summary. For a URL, create the folder locally and upload it.

    If the process is killed or fails, finished shards stay in `<output>.partial`. The next call reuses these shards,
    and the interruption does not change the result.

    overwrite: replace an existing dataset, but no other folder. wait: wait for a process that is making `output`; if
    the dataset exists, return its summary. Raises DataError if `output` exists or a process is making it, if an input
    is missing, damaged or has no document, or if a disk is full.
    """
    from .pipeline import Pipeline

    if isinstance(output, str) and storage.is_url(output):
        return _prepare_remote(options, output.rstrip("/"), progress, overwrite, wait)
    output = Path(output).expanduser()
    with output_lock(output, wait=wait):
        if wait and (output / "dataset.json").exists():
            return Summary.read(output)
        _check_output(output, overwrite)
        partial = output.with_name(f"{output.name}.partial")
        try:
            summary = Pipeline(options, partial, progress).run()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise DataError(
                f"there is no space to write {error.filename or partial} ({error.strerror}): finished parts stay in"
                f" {partial}; free some space and run the same command again to continue"
            ) from None
        finally:
            if partial.exists() and not (partial / "out").exists() and not any(partial.rglob("*.json")):
                shutil.rmtree(partial, ignore_errors=True)  # no shard is finished
        _replace(partial / "out", output)
        shutil.rmtree(partial, ignore_errors=True)
        return summary


def _prepare_remote(options: PrepareOptions, url: str, progress: bool, overwrite: bool, wait: bool) -> Summary:
    place = cache_folder("prepared") / key_of(url, options.plain)
    with output_lock(place, wait=wait):
        if wait and "dataset.json" in storage.listing(url) and (folder := locate(url)[1]):
            return Summary.read(folder)
        if storage.listing(url) and not overwrite:
            raise DataError(f"{url} is not empty: overwrite it explicitly or choose a different output")
        made = place / "made"
        summary = prepare(options, made, progress, overwrite=True)
        # dataset.json is last, because it marks a prepared folder.
        for path in sorted(filter(Path.is_file, made.rglob("*")), key=lambda path: path.name == "dataset.json"):
            storage.upload(path, storage.join(url, path.relative_to(made).as_posix()))
        locate_remote.cache_clear()
        shutil.rmtree(place)
        return summary


@contextmanager
def output_lock(output: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock folder `output` while it is created. Raises DataError if it is already locked, or cannot be created."""
    if output.name in ("", ".."):
        raise DataError(f"{output} cannot be replaced: choose a different output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _locked(output.with_name(f".{output.name}.lock"), wait):
            yield
    except BlockingIOError:
        raise DataError(f"another process is preparing {output}: wait for it, or choose a different output") from None
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise DataError(f"{output} cannot be created ({error.strerror}{where})") from None


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold the lock file `path`, and remove it at the end; the package filelock would not remove it.

    Raises BlockingIOError if a different process holds the lock.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.fstat(file).st_nlink:  # otherwise the previous holder has removed the file
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # the lock is still held
                return
        finally:
            os.close(file)


def _check_output(output: Path, overwrite: bool) -> None:
    """Raise DataError unless `output` is absent or empty, or is a prepared dataset and `overwrite` is true."""
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / "dataset.json").exists():
        raise DataError(f"{output} exists and is not a prepared dataset: choose a different output")
    if not overwrite:
        raise DataError(f"{output} is already prepared: overwrite it explicitly or choose a different output")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `output` at the end of the block, or is removed after an error."""
    made = output.with_name(f".{output.name}.new")
    shutil.rmtree(made, ignore_errors=True)  # left by a killed process
    made.mkdir(parents=True)
    try:
        yield made
        _replace(made, output)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def make_once(folder: Path, write: Callable[[Path], object], last: str = "") -> None:
    """Call `write` with an empty folder that becomes `folder`, unless `folder` exists. Other processes wait.

    last: name of a file; a folder without this file is replaced.
    """
    with output_lock(folder, wait=True):
        if not (folder / last).exists():
            with new_folder(folder) as made:
                write(made)


def _replace(made: Path, output: Path) -> None:
    """Rename the finished folder `made` to `output`, and remove the old folder."""
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        output.rename(old)
    made.rename(output)
    shutil.rmtree(old, ignore_errors=True)
