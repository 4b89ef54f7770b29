"""Local copies of checkpoints in buckets. A copy holds only the chunks that this machine has needed so far.

A chunk that is absent or damaged has a wrong checksum, so one pass checks and fetches the chunks to be read.
"""

import os
from collections.abc import Collection
from pathlib import Path

from xxhash import xxh3_128

from crosstrain.checkpoint.manifest import CHUNK, DIGITS, MANIFEST, MOST_BYTES, Files, IncompatibleCheckpointError
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError
from crosstrain.utils.files import write_atomically

Chunk = tuple[str, int]  # (file, index of the chunk)

_AT_ONCE = 32  # maximum number of chunks in memory


def has_manifest(folder: Path) -> bool:
    """Return True for a checkpoint. In a bucket, a checkpoint exists as soon as its manifest does."""
    if (url := storage.origin(folder)) is None:
        return os.path.lexists(folder / MANIFEST)
    return MANIFEST in storage.listing(url)


def fetch_manifest(folder: Path) -> None:
    """Replace the local copy of a manifest. Raises CheckpointError if the bucket has none, or it is too large."""
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
    """Raise CheckpointError unless the bucket has every file of a checkpoint, with the right size."""
    url = storage.origin(folder) or ""
    there = storage.listing(url)
    for name, entry in files.items():
        if there.get(name) != entry["bytes"]:
            found = "not there" if name not in there else f"{there[name]} bytes"
            raise CheckpointError(f"{storage.join(url, name)}: {found} instead of {entry['bytes']} bytes")


def chunks(name: str, first: int, last: int) -> set[Chunk]:
    """Return the chunks of a file that contain its bytes [first, last)."""
    return {(name, number) for number in range(first // CHUNK, -(-last // CHUNK))}


def fetch(folder: Path, files: Files, wanted: Collection[Chunk]) -> None:
    """Make the local chunks match their checksums. Raises CheckpointError if the bucket's data does not match."""
    for name in sorted({name for name, _ in wanted}):
        entry, url = files[name], storage.join(storage.origin(folder) or "", name)
        if "xxh3" not in entry:
            raise IncompatibleCheckpointError(
                f"{url} is of an earlier format; copy the checkpoint to a disk, and name it there"
            )
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
    """Return an ID of this local copy: the same for all ranks that share the copy, and different for all others."""
    folder.mkdir(parents=True, exist_ok=True)
    status = os.stat(folder)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text() if boot.exists() else os.uname().nodename} {status.st_dev} {status.st_ino}"
