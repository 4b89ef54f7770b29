"""The summary and files of a prepared dataset."""

import hashlib
import json
import re
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from crosstrain import DataError, cache_folder, read_regular, write_atomically
from crosstrain.utils import storage
from crosstrain.utils.program import command

FORMAT_VERSION = 1
_MOST_BYTES = 1 << 26  # maximum size of dataset.json, in bytes


@dataclass
class Summary:
    """The content of `dataset.json`."""

    format_version: int
    documents: int
    dropped: int  # documents that were read but left out
    tokens: int  # including one end-of-text token per document
    text_bytes: int  # total size of kept and dropped documents, in bytes of UTF-8
    vocab_size: int
    eod_id: int
    dtype: str
    tokenizer_sha256: str  # hash of tokenizer/tokenizer.json
    options: dict[str, Any]  # the PrepareOptions that were used

    @classmethod
    def read(cls, folder: Path) -> "Summary":
        """Read the summary of a prepared folder. Raises DataError if this version cannot read the summary."""
        path = folder / "dataset.json"
        try:
            content = json.loads(read_regular(path, _MOST_BYTES))
            if (version := content.get("format_version")) == FORMAT_VERSION:
                return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path} does not describe a prepared dataset: {error!r}; prepare it again") from None
        raise DataError(f"{path} has format version {version}, not {FORMAT_VERSION}: prepare it again")

    def check_tokenizer(self, folder: Path) -> None:
        """Raise DataError unless a prepared folder contains the tokenizer that encoded its tokens."""
        path = folder / "tokenizer" / "tokenizer.json"
        if not path.is_file() or hash_of(path) != self.tokenizer_sha256:
            raise DataError(
                f"{path} is not the tokenizer that encoded the tokens beside it: put the original back, or prepare the "
                f"data again"
            )


def hash_of(tokenizer: Path) -> str:
    """Return the SHA-256 of a tokenizer.json, in hexadecimal."""
    return hashlib.sha256(tokenizer.read_bytes()).hexdigest()


def locate(where: str | Path) -> tuple[str | Path, Path | None]:
    """Return (prefix of the token files, prepared folder or None) for the path or URL of token files or a folder.

    For a prepared folder in a bucket, the returned folder is a local copy without the tokens. Raises DataError if there
    are no tokens or several token files, and StorageError if the bucket cannot be read.
    """
    if isinstance(where, str) and storage.is_url(where):
        return locate_remote(where.rstrip("/"))
    path = Path(where).expanduser()
    if path.suffix in (".idx", ".bin"):
        path = path.with_suffix("")
    if (path / "dataset.json").exists():
        return path / "tokens", path
    if path.with_name(path.name + ".idx").exists():
        return path, None
    return _only(sorted(str(found) for found in path.glob("*.idx")), path), None


def _only(found: list[str], path: str | Path) -> str:
    """Return the prefix of the only index file. Raises DataError if there is no index file or more than one."""
    if len(found) > 1:
        names = ", ".join(name.rpartition("/")[2].removesuffix(".idx") for name in found)
        raise DataError(f"{path} contains several token files ({names}): give the path of one of them")
    if not found:
        if isinstance(path, Path) and any(path.glob("*.txt") if path.is_dir() else [path.is_file()]):
            raise DataError(
                f"{path} contains text, not tokens: run `{command('prepare')} --input {path} --tokenizer "
                f"FOLDER_OR_NAME --output NEW`, or set path to a new folder and prepare: {{input: {path}, "
                f"tokenizer: FOLDER_OR_NAME}}"
            )
        raise DataError(
            f"there are no tokens at {path}: expected a folder made by `crosstrain prepare` or a Megatron prefix; run"
            f" `{command('prepare')}`, or set the option `prepare`"
        )
    return found[0].removesuffix(".idx")


@lru_cache(maxsize=64)  # called for each split
def locate_remote(url: str) -> tuple[str, Path | None]:
    """Locate token files as `locate` does, for a URL."""
    if url.endswith((".idx", ".bin")):
        return url[:-4], None
    inside = storage.files(url)
    if "dataset.json" in inside:
        copy = cache_folder("prepared") / hashlib.sha256(url.encode()).hexdigest()[:24]
        for name in ("dataset.json", *(name for name in inside if re.fullmatch(r"tokenizer/[\w.-]+", name))):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy / name, storage.read(storage.join(url, name)))
        return storage.join(url, "tokens"), copy
    if f"{url}.idx".rpartition("/")[2] in storage.listing(url.rpartition("/")[0]):
        return url, None
    return _only([storage.join(url, name) for name in sorted(inside) if re.fullmatch(r"[^/]+\.idx", name)], url), None
