"""Random access to samples in tar files: WebDataset's layout with an index of file offsets."""

import glob
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Collection, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from braceexpand import braceexpand
from filelock import FileLock
from webdataset.gopen import gopen, gopen_schemes

from crosstrain import (
    DataError,
    LimitedProcess,
    LimitError,
    check_command,
    open_regular,
    os_errors_as,
    replacing,
    write_atomically,
)
from crosstrain.utils import storage

from .row_audit import RowAudit

Files = dict[str, tuple[int, int]]  # extension -> (offset, size) in bytes
Keys = Callable[[str, dict[str, bytes]], Iterable[str]]
_VERSION = 3
TEXTS = ("json", "txt", "text", "caption")  # final file extensions of text members
_TEXT_BYTES = 1 << 24  # maximum number of bytes of a text member to read for the index
_COMMAND = "pipe:"
_MOST_SHARDS = 1_000_000
_SEARCH = 10.0  # time limit for expanding patterns, in CPU seconds
# URL schemes that `storage` reads; webdataset supports more schemes, but runs external programs for some of them.
_BUCKETS = ("s3", "gcs", "az", "abfs", "memory")


def expand(patterns: str | list[str]) -> list[str]:
    """Expand braces and wildcards to the names of local and remote shards, in order.

    Raises DataError if a wildcard has no match, if there are too many shards, or if `is_remote` rejects a name.
    """
    given = [patterns] if isinstance(patterns, str) else patterns
    if not any(set(pattern) & set("{*?[") for pattern in given):
        return _names(given)
    look = LimitedProcess(_names, "looking for shards", seconds=_SEARCH, advice="write fewer braces and wildcards")
    try:
        return look(given)
    except LimitError as error:
        others = f" and {len(given) - 1} more patterns" if len(given) > 1 else ""
        raise DataError(f"{given[0][:100]}{others}: {error}") from None
    finally:
        look.close()


def _names(patterns: list[str]) -> list[str]:
    found: list[str] = []
    for pattern in patterns:
        for name in [pattern] if pattern.startswith(_COMMAND) else braceexpand(pattern):
            is_name = is_remote(name) or not glob.has_magic(name)
            matches = [name] if is_name else sorted(glob.glob(os.path.expanduser(name)))
            if not matches:
                raise DataError(f"no shard matches {name}")
            found += matches
            if len(found) > _MOST_SHARDS:
                others = " and the patterns before it" if pattern != patterns[0] else ""
                raise DataError(f"{pattern[:100]}{others}: more than {_MOST_SHARDS} shards")
    return found


def is_remote(name: str) -> bool:
    """Return True for a remote shard: pipe:COMMAND, or SCHEME://... with a supported scheme.

    Raises DataError for control characters, leading or trailing blanks and unsupported schemes, and ConfigError for a
    command if the configuration is not trusted to run commands.
    """
    if name != name.strip() or not name.isprintable():
        raise DataError(f"{name!r}: a shard's name must not begin or end with blanks or contain control characters")
    if name.startswith(_COMMAND):
        check_command(name)
        return True
    scheme, _, rest = name.partition(":")
    if scheme == "file" or ("://" not in name and scheme.strip().lower() != "pipe"):
        return False
    if (scheme not in gopen_schemes and scheme not in _BUCKETS) or not rest.startswith("//"):
        known = ", ".join(f"{key}://" for key in (*gopen_schemes, *_BUCKETS) if key not in ("pipe", "__default__"))
        raise DataError(f"{name}: shards cannot be read from {scheme}:; use a file, {known} or {_COMMAND}COMMAND")
    return True


def local_path(name: str) -> Path:
    """Return the path of a local shard."""
    return Path(name.removeprefix("file:").removeprefix("//")).expanduser()


def prepare(names: Iterable[str], cache: Path, keys: Keys = lambda name, content: ()) -> None:
    """Fetch and index new shards; several processes may call this at the same time.

    keys: function that returns the annotation keys of a sample, which the index counts. `keys` gets the sample's name
    and a dict extension -> content, with empty bytes for members that are not text. Raises DataError on failure.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for name in names:
        with FileLock(cache / f"{_digest(name)}.lock"):
            path = _local(name, cache)
            if is_remote(name) and not path.exists():
                _fetch(name, path)
            if _read_head(path, cache) is None:
                _write_index(path, cache, keys)


def _local(name: str, cache: Path) -> Path:
    """Return the path of a local shard, or of the copy of a remote shard."""
    return cache / f"{_digest(name)}.tar" if is_remote(name) else local_path(name)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _fetch(name: str, path: Path) -> None:
    """Copy a remote shard to `path` atomically."""
    with replacing(path) as file:
        with os_errors_as(DataError, f"{name} cannot be fetched", ValueError):
            if name.partition(":")[0] in _BUCKETS:
                storage.download(name, Path(file.name))
            else:  # webdataset reports a failed pipe as an OSError
                with gopen(name, "rb") as stream:
                    shutil.copyfileobj(stream, file, 1 << 20)
            file.flush()
        if not tarfile.is_tarfile(file.name):
            raise DataError(f"{name}: the fetched data is not a tar file")


# ---- the index: a header line, one line per sample, and the offset of each of these lines (int64)


def _index_path(path: Path, cache: Path) -> Path:
    return cache / f"{_digest(str(path.absolute()))}.index"


def _state(path: Path) -> dict[str, int]:
    """Return the format version and the shard's size and modification time, to detect an outdated index.

    Raises DataError if the shard is missing or not a regular file.
    """
    with os_errors_as(DataError, f"the shard {path} cannot be opened"), open_regular(path) as file:
        found = os.fstat(file.fileno())
    return {"version": _VERSION, "bytes": found.st_size, "modified": found.st_mtime_ns}


def _read_head(path: Path, cache: Path) -> dict[str, Any] | None:
    """Return the header of a shard's index; None if the index is incomplete or outdated."""
    state = _state(path)
    try:
        with open(_index_path(path, cache), "rb") as file:
            head = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    return head if state.items() <= head.items() else None


def _write_index(path: Path, cache: Path, keys: Keys) -> None:
    """Write the index of a shard."""
    lines, audit = [], RowAudit()
    with open_regular(path) as file:
        for key, files in _scan(path).items():
            lines.append(json.dumps((key, files)).encode() + b"\n")
            texts = {e: place for e, place in files.items() if e.rpartition(".")[2] in TEXTS}
            content = {e: os.pread(file.fileno(), min(size, _TEXT_BYTES), start) for e, (start, size) in texts.items()}
            audit.row(f"{path.name}: {key}", keys(key, dict.fromkeys(files, b"") | content))
    head = json.dumps(_state(path) | {"samples": len(lines), "audit": audit.plain}).encode() + b"\n"
    begin = np.array([len(head), *map(len, lines)], np.int64).cumsum()[:-1]
    write_atomically(_index_path(path, cache), head + b"".join(lines) + begin.tobytes())


def _scan(path: Path) -> dict[str, Files]:
    """Return sample key -> files, ordered by first member; the members of a sample need not be adjacent.

    A key ends before the first dot of the file name. Raises DataError if two files have the same name.
    """
    samples = dict[str, Files]()
    with (
        os_errors_as(DataError, f"the shard {path} is not a readable tar file", tarfile.TarError),
        open_regular(path) as file,
        tarfile.open(fileobj=file, mode="r:") as tar,
    ):
        for member in filter(tarfile.TarInfo.isfile, tar):
            folder, slash, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            files = samples.setdefault(f"{folder}{slash}{stem}", {})
            if extension.lower() in files:
                raise tarfile.TarError(f"it contains {member.name} twice")
            files[extension.lower()] = (member.offset_data, member.size)
    return samples


class Shards:
    """Samples of several prepared shards, concatenated; `audit` counts the samples and the keys outside `used`."""

    def __init__(self, names: list[str], cache: Path, used: Collection[str] = ()) -> None:
        self.paths = [_local(name, cache) for name in names]
        self.cache = cache
        self.audit = RowAudit(used)
        counts = []
        for name, path in zip(names, self.paths, strict=True):
            if (head := _read_head(path, cache)) is None:
                raise DataError(f"{name} changed or was added after training started: restart training")
            counts.append(head["samples"])
            self.audit.add(head["audit"])
        self.starts = np.array([0, *accumulate(counts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        """Return ("SHARD: KEY", extension -> content) of a sample.

        Raises DataError if the shard cannot be read or has become shorter.
        """
        path, key, files = self._find(index)
        content = {}
        with os_errors_as(DataError, f"the shard {path} cannot be read"), open(path, "rb") as file:
            for extension, (start, size) in files.items():
                file.seek(start)
                content[extension] = file.read(size)
                if len(content[extension]) < size:
                    raise DataError(f"the shard {path} ends within {key}.{extension}")
        return f"{path.name}: {key}", content

    def name(self, index: int) -> str:
        """Return "SHARD: KEY" of a sample."""
        path, key, _ = self._find(index)
        return f"{path.name}: {key}"

    def _find(self, number: int) -> tuple[Path, str, Files]:
        """Return (path of the shard, key, files) of a sample."""
        shard = int(np.searchsorted(self.starts, number, "right")) - 1
        index = _index_path(self.paths[shard], self.cache)
        with (
            os_errors_as(DataError, f"the shard index {index} changed while it was being read", ValueError, IndexError),
            open(index, "rb") as file,
        ):
            file.seek(8 * (number - int(self.starts[shard + 1])), os.SEEK_END)
            file.seek(int(np.fromfile(file, np.int64, 1)[0]))
            return self.paths[shard], *json.loads(file.readline())
