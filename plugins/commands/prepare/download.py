"""Download files from the web and resume interrupted transfers.

fsspec neither resumes nor retries: after an error, its HTTP files start again from the first byte.
"""

import logging
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from tqdm import tqdm

from crosstrain import DataError, __version__
from crosstrain.utils import storage
from crosstrain.utils.errors import os_errors_as
from crosstrain.utils.files import replacing

AGENT = f"crosstrain/{__version__}"
_BLOCK = 1 << 20
_TRIES = 8  # consecutive tries without a new byte
_log = logging.getLogger(__name__)


def download(url: str, folder: Path, progress: bool, patience: float = 1.0, timeout: float = 60.0) -> Path:
    """Download a file into `folder`, unless it exists, and return its path.

    The file is named after the last part of the URL's path; an object in a bucket keeps its folders. An interrupted
    download stays next to the target. The next download requests only the rest, if the file on the server is unchanged.
    patience: seconds before the second try, doubled before each further one. Raises DataError if the server refuses, or
    if several tries receive nothing more.
    """
    if not url.startswith(("http://", "https://")):
        target = folder / url.partition("://")[2]
        if ".." in target.parts:
            raise DataError(f"{url}: .. cannot be part of an object's name here")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with os_errors_as(DataError, f"{url} cannot be fetched"), replacing(target) as file:
                storage.download(url, Path(file.name))
        return target
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).name
    if not name:
        raise DataError(f"{url} names no file")
    target = folder / name
    if target.exists():
        return target
    partial, tries = target.with_name(name + ".part"), 0
    while True:
        before = partial.stat().st_size if partial.exists() else 0
        try:
            _transfer(url, target, partial, progress, timeout)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 425, 429):
                raise DataError(f"{url} cannot be fetched: the server says {error.code} {error.reason}") from None
            reason: object = f"{error.code} {error.reason}"
        except (OSError, EOFError) as error:
            if getattr(error, "filename", None):
                raise  # an error of the disk, not of the network
            reason = getattr(error, "reason", None) or error
        else:
            return target
        tries = 0 if partial.exists() and partial.stat().st_size > before else tries + 1
        if tries >= _TRIES:
            raise DataError(
                f"{url} cannot be fetched ({reason}): what arrived is kept in {partial}, and the same command goes on"
            )
        _log.warning("fetching %s broke off (%s); trying again", url, reason)
        time.sleep(patience * 2 ** max(tries - 1, 0))


def _transfer(url: str, target: Path, partial: Path, progress: bool, timeout: float) -> None:
    notes = target.with_name(target.name + ".version")  # an HTTP validator: shows whether the file has changed
    start = partial.stat().st_size if partial.exists() else 0
    headers = {"User-Agent": AGENT}
    if start and notes.exists() and (validator := notes.read_text()):
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # the partial file is already complete, or of a different file
            raise
        partial.unlink(missing_ok=True)
        raise EOFError("the part that is here does not fit the file") from None
    with answer:
        if answer.status != 206:  # the server sends the whole file
            start, etag = 0, answer.headers.get("ETag")
            strong = etag if etag and not etag.startswith("W/") else None
            notes.write_text(strong or answer.headers.get("Last-Modified", ""))
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length else None
        bar = {"desc": f"fetch {target.name}", "total": total, "initial": start, "disable": not progress}
        with open(partial, "ab" if start else "wb") as file, tqdm.wrapattr(answer, "read", **bar) as stream:
            shutil.copyfileobj(stream, file, _BLOCK)
            file.flush()
            os.fsync(file.fileno())
            if total is not None and file.tell() < total:
                raise EOFError(f"{file.tell():,} of {total:,} bytes arrived")
    partial.replace(target)
    notes.unlink(missing_ok=True)
