"""Access through fsspec to objects in a bucket, at URLs such as s3://bucket/folder/name.

The protocol's library finds the credentials; there is no option for them. Transient failures are retried. StorageError
reports permanent failures in one sentence: a missing package, refused credentials, an unreachable host. A missing
object raises FileNotFoundError.
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import random
from typing import Any, TypeVar

from crosstrain.utils.errors import StorageError, first_line, sentence
from crosstrain.utils.files import cache_folder
from crosstrain.utils.optional_deps import missing

T = TypeVar("T")

_URL = re.compile(r"([a-z][a-z0-9+.\-]*)://")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_ATTEMPTS = 8  # with pauses of about 25 s in total
_PATIENCE = 60.0  # after this many seconds, two attempts are enough, because libraries retry requests too
# Words in the class names of errors that libraries raise for missing, wrong or expired credentials.
_CREDENTIALS = re.compile(r"Credential|Token|Auth|Refresh|Permission")


def is_url(path: object) -> bool:
    """Return True for the URL of a bucket or an object in it, and False for a local path."""
    return isinstance(path, str) and _URL.match(path) is not None


def join(url: str, *names: str) -> str:
    return "/".join([url.rstrip("/"), *names])


def local(path: str | Path) -> Path:
    """Return a local path unchanged; for a URL, return the path of its copy in the user's cache."""
    if not is_url(path):
        return Path(path)
    protocol, _, rest = str(path).partition("://")
    names = list(filter(None, rest.split("/")))
    if {".", ".."} & {*names}:
        raise StorageError(f"{path}: not a valid URL of an object")
    return _copies().joinpath(protocol, *names)


def origin(path: Path) -> str | None:
    """Return the URL of which `path`, in the cache, is the local copy; None for any other path."""
    if not path.is_relative_to(_copies()):
        return None
    protocol, *names = path.relative_to(_copies()).parts
    return f"{protocol}://{'/'.join(names)}"


def _copies() -> Path:
    return cache_folder("buckets").absolute()


def listing(url: str) -> dict[str, int | None]:
    """Return name -> size for everything directly below `url`. The size of a folder is None."""
    return _below(url, lambda fs, path: {entry["name"]: entry for entry in fs.ls(path, detail=True)})


def files(url: str) -> dict[str, int | None]:
    """Return name -> size for all objects below `url`. Names are relative to `url`."""
    return _below(url, lambda fs, path: fs.find(path, detail=True))


def size(url: str) -> int:
    """Return an object's size in bytes."""
    return tried(url, lambda fs, path: fs.info(path)["size"])


def version(url: str) -> str:
    """Return a version string that changes when an object is written again."""
    return str(tried(url, lambda fs, path: fs.checksum(path)))


def read(url: str, first: int = 0, last: int | None = None) -> bytes:
    """Read the bytes [first, last) of an object; `last=None`: to the end. The range must not be empty."""
    return tried(url, lambda fs, path: fs.cat_file(path, start=first, end=last))


def read_end(url: str, most: int, first: bool = False) -> bytes:
    """Read at most `most` bytes from the end of an object, or from its start with first=True."""
    there = size(url)
    begin = 0 if first else max(0, there - most)
    return read(url, begin, begin + most) if there else b""  # services reject every range of an empty object


def write(url: str, data: bytes) -> None:
    """Write an object. An existing object is replaced."""
    tried(url, lambda fs, path: fs.pipe_file(path, data))


def create(url: str, data: bytes) -> bool:
    """Write an object unless it exists. If there are several writers, one gets True and the others get False."""

    def action(fs: Any, path: str) -> bool:
        try:
            fs.pipe_file(path, data, mode="create")
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            if not fs.exists(path):  # no writer has succeeded yet
                raise
            return fs.cat_file(path) == data  # True if an earlier attempt of ours succeeded without a response
        return True

    return tried(url, action)


def upload(path: Path, url: str) -> None:
    """Upload a local file. Large files are uploaded in parts, and only some parts are in memory at a time."""
    tried(url, lambda fs, target: fs.put_file(str(path), target))


def download(url: str, path: Path) -> None:
    """Download an object to a local file."""
    tried(url, lambda fs, source: fs.get_file(source, str(path)))


def remove(url: str) -> None:
    """Delete an object, or everything below `url`. A missing object is not an error."""
    with suppress(FileNotFoundError):
        tried(url, lambda fs, path: fs.rm(path, recursive=True))


def rename(url: str, other: str) -> None:
    """Copy everything below `url` to the URL `other`, then delete the original."""

    def action(fs: Any, path: str) -> None:
        found = fs.find(path)  # only objects: adlfs cannot copy the folders that it lists
        fs.copy(found, [fs._strip_protocol(other) + name.removeprefix(path) for name in found])
        fs.rm(path, recursive=True)

    tried(url, action)


def _below(url: str, find: Callable[[Any, str], dict[str, Any]]) -> dict[str, int | None]:
    def action(fs: Any, path: str) -> dict[str, int | None]:
        base = path.rstrip("/") + "/"
        return {
            name.rstrip("/").removeprefix(base): None if entry["type"] == "directory" else entry["size"]
            for name, entry in find(fs, path).items()
            if name.startswith(base) and name != base and ".." not in name.split("/")  # `..` would leave the folder
        }

    try:
        return tried(url, action)
    except FileNotFoundError:
        return {}


def tried(url: str, action: Callable[[Any, str], T]) -> T:
    """Call `action` with the file system and path of a URL. Retries failures that may be transient."""
    fs, began = _file_system(url), time.monotonic()
    for attempt in count(1):
        try:
            return action(fs, fs._strip_protocol(url))
        except FileNotFoundError:
            raise
        except Exception as error:
            if (status := getattr(error, "status_code", None)) == 404:  # Azure raises this for a missing container
                raise FileNotFoundError(_words(error)) from error
            if status in (401, 403) or any(_CREDENTIALS.search(type(e).__name__) for e in (error, error.__cause__)):
                reason = "the credentials were refused, are missing or have expired"
            elif attempt < (_ATTEMPTS if time.monotonic() < began + _PATIENCE else 2):
                time.sleep(min(2.0**attempt / 8, 8.0) * (0.5 + random()))  # ranks should not all retry at once
                continue
            else:
                reason = f"failed after {attempt} attempt(s)"
            raise StorageError(f"{url}: {reason} ({_words(error)})") from error
    raise AssertionError("counting does not end")


def _file_system(url: str) -> Any:
    """Return the file system of a URL. Each process opens a file system only once."""
    protocol = url.partition("://")[0]
    import fsspec  # this import takes 50 ms, and local runs do not need it

    try:
        # Other processes write too, so listings must not be cached.
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError as error:
        if (package := _PACKAGES.get(protocol)) is None:
            raise StorageError(f"{url}: {_words(error)}") from error
        raise missing(url, package) from error
    except Exception as error:
        if protocol in fsspec.available_protocols():  # credentials may be missing
            raise StorageError(f"{url}: cannot be opened ({_words(error)})") from error
        known = ", ".join(f"{name}://" for name in _PACKAGES)
        raise StorageError(
            f"{url}: unknown protocol {protocol}; known: {known} and the other protocols of fsspec"
        ) from None


def _words(error: Exception) -> str:
    """Return the first line of an error's message. Later lines may hold the whole request and its headers."""
    return sentence(getattr(error, "strerror", None) or first_line(error))
