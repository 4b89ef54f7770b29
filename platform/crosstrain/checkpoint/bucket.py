"""Local copies of checkpoints in buckets, which hold the chunks of files that this machine has needed so far.

A chunk that is absent or damaged has a wrong sum, so checking what will be read and fetching it is one pass.
"""

import os
from collections.abc import Collection
from pathlib import Path

from xxhash import xxh3_128

from crosstrain.checkpoint.manifest import CHUNK, DIGITS, MANIFEST, MOST_BYTES, Files, IncompatibleCheckpointError
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError
from crosstrain.utils.files import write_atomically

Chunk = tuple[str, int]  # of a file, with its number

_AT_ONCE = 32  # chunks that are in memory


def has_manifest(folder: Path) -> bool:
    """Return True for a checkpoint, which in a bucket exists from the moment when its manifest does."""
    if (url := storage.origin(folder)) is None:
        return os.path.lexists(folder / MANIFEST)
    return MANIFEST in storage.listing(url)


def fetch_manifest(folder: Path) -> None:
    """Make the local copy of a manifest anew. Raises CheckpointError where there is none, or none of a usual size."""
    url = storage.join(storage.origin(folder) or "", MANIFEST)
    try:
        if (size := storage.size(url)) > MOST_BYTES:
            raise CheckpointError(f"{url}: its {size} bytes are more than the {MOST_BYTES} that are read")
        text = storage.read_end(url, size)
    except FileNotFoundError:
        raise CheckpointError(f"{url}: there is no such object") from None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / MANIFEST, text)


def check_sizes(folder: Path, files: Files) -> None:
    """Raise CheckpointError unless the bucket has each of a checkpoint's files in its size."""
    url = storage.origin(folder) or ""
    there = storage.listing(url)
    for name, entry in files.items():
        if there.get(name) != entry["bytes"]:
            found = "not there" if name not in there else f"{there[name]} bytes"
            raise CheckpointError(f"{storage.join(url, name)}: {found} instead of {entry['bytes']} bytes")


def chunks(name: str, first: int, last: int) -> set[Chunk]:
    """Return the chunks of a file that its bytes [first, last) lie in."""
    return {(name, number) for number in range(first // CHUNK, -(-last // CHUNK))}


def fetch(folder: Path, files: Files, wanted: Collection[Chunk]) -> None:
    """Make chunks of the local copy as the sums say. Raises CheckpointError where the bucket's are not."""
    for name in sorted({name for name, _ in wanted}):
        entry, url = files[name], storage.join(storage.origin(folder) or "", name)
        if "xxh3" not in entry:
            problem = "is of an earlier format; copy the checkpoint to a disk, and name it there"
            raise IncompatibleCheckpointError(f"{url} {problem}")
        sums = {i: entry["xxh3"][DIGITS * i : DIGITS * (i + 1)] for file, i in sorted(wanted) if file == name}
        with open(folder / name, "r+b", buffering=0, opener=lambda p, flags: os.open(p, flags | os.O_CREAT)) as file:
            file.truncate(entry["bytes"])
            bad = [i for i in sums if xxh3_128(os.pread(file.fileno(), CHUNK, i * CHUNK)).hexdigest() != sums[i]]
            for now in (bad[start : start + _AT_ONCE] for start in range(0, len(bad), _AT_ONCE)):
                spans = [(i * CHUNK, min((i + 1) * CHUNK, entry["bytes"])) for i in now]
                for i, data in zip(now, storage.read_ranges(url, spans, gap=0), strict=True):
                    if xxh3_128(data).hexdigest() != sums[i]:
                        raise CheckpointError(f"{url}: contents differ from what was written (a sum is wrong)")
                    os.pwrite(file.fileno(), data, i * CHUNK)


def machine(folder: Path) -> str:
    """Return what ranks that share this local copy have in common, and no others."""
    folder.mkdir(parents=True, exist_ok=True)
    status = os.stat(folder)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text() if boot.exists() else os.uname().nodename} {status.st_dev} {status.st_ino}"
