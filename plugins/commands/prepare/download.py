"""Download files from the web and from buckets, and resume interrupted transfers."""

import hashlib
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from huggingface_hub.file_download import get_hf_file_metadata, http_get
from tqdm import tqdm

from crosstrain import DataError, __version__, explained, replacing
from crosstrain.utils import storage

AGENT = f"crosstrain/{__version__}"


def download(url: str, folder: Path, progress: bool) -> Path:
    """Download a file into `folder`, unless the file exists there, and return its path.

    The file is named after the last part of the URL's path; an object in a bucket keeps its folders. Raises DataError
    if the server refuses the request, or if several attempts in a row receive no data.
    """
    is_web = url.startswith(("http://", "https://"))
    name = Path(unquote(urlsplit(url).path)).name if is_web else url.partition("://")[2]
    target = folder / name
    if not name or ".." in target.parts:
        raise DataError(f"{url} does not name a file")
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with explained(
        f"{url} cannot be fetched; the received part is kept, and the same command continues from there", DataError
    ):
        if is_web:
            _transfer(url, target, progress)
        else:
            with replacing(target) as file:
                storage.download(url, Path(file.name))
    return target


def _transfer(url: str, target: Path, progress: bool) -> None:
    """Download a file from the web; resume an interrupted download if the file on the server is unchanged."""
    there = get_hf_file_metadata(url, token=False, user_agent=AGENT)
    version = hashlib.blake2b(f"{there.etag} {there.size}".encode(), digest_size=4).hexdigest()
    part = target.with_name(f"{target.name}.{version}.part")
    # With If-Range, the server sends the whole file if it has changed.
    unchanged = {"If-Range": f'"{there.etag}"'} if there.etag else {}
    with open(part, "ab") as file:
        start = file.tell() if there.etag else file.truncate(0)
        http_get(
            url,
            file,
            resume_size=start,
            headers={"User-Agent": AGENT, "Accept-Encoding": "identity"} | unchanged,
            expected_size=there.size,
            displayed_filename=target.name,
            tqdm_class=partial(tqdm, disable=not progress),
        )
    part.replace(target)
