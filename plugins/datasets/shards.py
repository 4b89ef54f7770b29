"""Samples inside tar files, each reachable at once: WebDataset's layout with an index of where everything lies."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np
from braceexpand import braceexpand
from filelock import FileLock
from webdataset.gopen import gopen

from crosstrain.errors import DataError

T = TypeVar("T")
Files = dict[str, tuple[int, int]]  # extension -> (first byte, bytes)
_VERSION = 1


def expand(patterns: str | list[str]) -> list[str]:
    """Shards by name: braces and wildcards expanded, in order. DataError where a wildcard matches nothing."""
    found: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for name in [pattern] if pattern.startswith("pipe:") else braceexpand(pattern):
            if is_remote(name) or not glob.has_magic(name):
                found.append(name)
            elif matches := sorted(glob.glob(os.path.expanduser(name))):
                found += matches
            else:
                raise DataError(f"no shard matches {name}")
    return found


def is_remote(name: str) -> bool:
    """Whether a shard is not a file here."""
    return name.startswith("pipe:") or "://" in name


def default_cache() -> Path:
    """Where indexes, and copies of remote shards, are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "crosstrain" / "shards"


def prepare(names: Iterable[str], cache: Path) -> None:
    """Fetch and index what is not yet; safe to be called by several processes at once. DataError where it fails."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in names:
        with FileLock(cache / f"{_digest(name)}.lock"):
            path = _local(name, cache)
            if is_remote(name) and not path.exists():
                _fetch(name, path)
            if _read_head(path, cache) is None:
                _write_index(path, cache)


def check_there(names: Iterable[str]) -> None:
    """DataError for a shard that should be a file here and is none."""
    for name in names:
        if not is_remote(name):
            _state(Path(name.removeprefix("file:")).expanduser())


def _local(name: str, cache: Path) -> Path:
    """Where a shard lies, or its copy will."""
    return cache / f"{_digest(name)}.tar" if is_remote(name) else Path(name.removeprefix("file:")).expanduser()


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _fetch(name: str, path: Path) -> None:
    """Copy a remote shard, which appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        try:
            with open(partial, "wb") as file, gopen(name, "rb") as stream:
                shutil.copyfileobj(stream, file, 1 << 20)
        except (OSError, ValueError) as error:  # webdataset reports a failed pipe as an OSError
            raise DataError(f"{name} cannot be fetched ({error})") from None
        if not tarfile.is_tarfile(partial):
            raise DataError(f"{name}: what came is not a tar file")
        os.replace(partial, path)


# ---- the index: a line that says what it is of, a line for each sample, and where these lines begin (int64)


def _index_path(path: Path, cache: Path) -> Path:
    return cache / f"{_digest(str(path.absolute()))}.index"


def _state(path: Path) -> dict[str, int]:
    """What changes when a shard does; DataError where there is none."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"the shard {path} cannot be opened ({error.strerror})") from None
    return {"version": _VERSION, "bytes": found.st_size, "modified": found.st_mtime_ns}


def _read_head(path: Path, cache: Path) -> int | None:
    """Number of samples by the index, None unless it is whole and of the shard as it is now."""
    state = _state(path)
    if not _index_path(path, cache).with_suffix(".table").exists():
        return None
    try:
        with open(_index_path(path, cache), encoding="utf-8") as file:
            head = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    return head.pop("samples") if head.keys() == {*state, "samples"} and state.items() <= head.items() else None


def _write_index(path: Path, cache: Path) -> None:
    """The table first, so that an index which is there is whole."""
    lines = [json.dumps(sample).encode() + b"\n" for sample in _scan(path)]
    head = json.dumps(_state(path) | {"samples": len(lines)}).encode() + b"\n"
    index = _index_path(path, cache)
    begin = np.array([0, *accumulate(map(len, lines))], np.int64) + len(head)
    for target, content in ((index.with_suffix(".table"), begin.tobytes()), (index, head + b"".join(lines))):
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        partial.write_bytes(content)
        os.replace(partial, target)


def _scan(path: Path) -> Iterator[tuple[str, Files]]:
    """(key, files) of each sample."""
    try:
        with tarfile.open(path, "r:") as tar:
            yield from grouped(tar, lambda member: (member.offset_data, member.size))
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"the shard {path} is not a readable tar file ({error})") from None


def grouped(tar: tarfile.TarFile, of: Callable[[tarfile.TarInfo], T]) -> Iterator[tuple[str, dict[str, T]]]:
    """(key, by extension what `of` says of a file) of each sample.

    A sample is the members that follow one another and share the name up to the first dot.
    """
    key, files = "", dict[str, T]()
    for member in tar:
        if not member.isfile():
            continue
        folder, _, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        this = f"{folder}/{stem}" if folder else stem
        if this != key and files:
            yield key, files
            files = {}
        key = this
        files[extension.lower()] = of(member)
    if files:
        yield key, files


class Shards:
    """The samples of several shards, one after another. They were prepared before."""

    def __init__(self, names: list[str], cache: Path) -> None:
        self.paths = [_local(name, cache) for name in names]
        self.cache = cache
        counts = [_read_head(path, cache) for path in self.paths]
        if None in counts:
            raise DataError(f"{names[counts.index(None)]} changed, or is new, since training started: start again")
        self.starts = np.array([0, *accumulate(c or 0 for c in counts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        """(shard and key, content by extension) of a sample. DataError where the shard changed meanwhile."""
        path, key, files = self._find(index)
        content = {}
        try:
            with open(path, "rb") as file:
                for extension, (start, size) in files.items():
                    file.seek(start)
                    content[extension] = file.read(size)
                    if len(content[extension]) < size:
                        raise DataError(f"the shard {path} ends within {key}.{extension}")
        except OSError as error:
            raise DataError(f"the shard {path} cannot be read ({error.strerror})") from None
        return f"{path.name}: {key}", content

    def name(self, index: int) -> str:
        """Shard and key of a sample."""
        path, key, _ = self._find(index)
        return f"{path.name}: {key}"

    def _find(self, index: int) -> tuple[Path, str, Files]:
        shard = int(np.searchsorted(self.starts, index, "right")) - 1
        path = self.paths[shard]
        return path, *self._entry(_index_path(path, self.cache), index - int(self.starts[shard]))

    def _entry(self, index: Path, number: int) -> tuple[str, Files]:
        """(key, files) of a shard's sample."""
        try:
            (begin,) = np.fromfile(index.with_suffix(".table"), np.int64, 1, offset=8 * number)
            with open(index, "rb") as file:
                file.seek(int(begin))
                key, files = json.loads(file.readline())
        except (OSError, ValueError) as error:
            raise DataError(f"{index}, an index of shards, was changed while it was read ({error})") from None
        return key, files
