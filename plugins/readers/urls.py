"""Read the main texts of the pages of a list of URLs."""

import hashlib
import logging
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated
from urllib.parse import urldefrag, urlsplit

from annotated_types import Interval
from tqdm import tqdm

from crosstrain import DataError, Document, PositiveInt, Reader, Task, Text, registry, require
from crosstrain.corpus.io import existing, files_below, lines, opened

from .crawl import CrawlOptions, PageStore, crawl
from .web_page import page_document

_IN_TASK = 256  # pages
_NOT_TEXT = [
    "3gp", "7z", "ai", "aif", "apk", "app", "avi", "bin", "bmp", "bz2", "css", "csv", "dat", "deb", "dmg", "doc",
    "docx", "exe", "gif", "gifv", "gz", "iso", "jar", "jpeg", "jpg", "js", "json", "key", "log", "m4a", "m4v", "mid",
    "midi", "mov", "mp3", "mp4", "mpeg", "mpg", "ogg", "ogv", "otf", "pdf", "pkg", "png", "ppt", "pptx", "psd", "py",
    "rar", "rss", "rtf", "svg", "swf", "tar", "tif", "tiff", "ttf", "wav", "webm", "webp", "wma", "wmv", "woff",
    "woff2", "xls", "xlsx", "xml", "xz", "zip",
]  # fmt: skip
_log = logging.getLogger(__name__)


@registry.register_reader("urls")
class UrlListReader(Reader):
    """Lists of URLs, one per line: fetched politely, a document per page, its main text taken out by trafilatura."""

    @dataclass
    class Options:
        """Pages to fetch, and limits on the requests. robots.txt is obeyed."""

        path: Text | list[Text]  # lists, compressed or not, and folders of them
        domains: list[Text] = field(default_factory=list)  # only these and what is below them; none: all
        blocked_domains: list[Text] = field(default_factory=list)  # not these, nor what is below them
        blocked_endings: list[Text] = field(default_factory=lambda: list(_NOT_TEXT))  # of the URL's path
        limit: PositiveInt | None = None  # pages; the first ones of the list
        hosts: Annotated[int, Interval(ge=1, le=1024)] = 16  # visited at the same time, each by one connection
        delay: Annotated[float, Interval(ge=0, le=86_400)] = 1.0  # seconds between two requests to a host
        timeout: Annotated[float, Interval(gt=0, le=86_400)] = 30.0  # seconds for an answer
        retries: Annotated[int, Interval(ge=0, le=100)] = 3  # after an error that may pass
        max_bytes: Annotated[int, Interval(ge=1, le=2**31)] = 10_000_000  # of a page

    options: Options
    pages: Path  # the SQLite file

    def fetch(self, folder: Path, progress: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        chosen = repr(self.options).encode() + b"".join(str(f.stat().st_mtime_ns).encode() for f in self._lists())
        self.pages = folder / f"pages-{hashlib.blake2b(chosen, digest_size=8).hexdigest()}.sqlite"
        require("trafilatura", "reading lists of URLs")
        refused: Counter[str] = Counter()
        pages = PageStore(self.pages)
        known = pages.add(self._urls(refused))
        crawl_options = CrawlOptions(**{f.name: getattr(self.options, f.name) for f in fields(CrawlOptions)})
        states = pages.states()
        total, todo = sum(states.values()), states.get("None", 0)
        with tqdm(desc="fetch pages", total=total, initial=total - todo, unit=" pages", disable=not progress) as bar:
            try:
                crawl(pages, crawl_options, bar.update)
            except sqlite3.OperationalError as error:
                raise DataError(
                    f"{self.pages} cannot be written ({error}): what was fetched stays; make room and run the same"
                    f" command again to go on"
                ) from None
        self.fetch_counts = {**refused, **pages.states()}
        if todo == total and known:
            self.fetch_counts["named more than once"] = known
        pages.base.close()
        if not self.fetch_counts.get("ok"):
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.fetch_counts.items()) or "they are empty"
            raise DataError(f"{self.options.path} gave no page: {reasons}")

    def _lists(self) -> list[Path]:
        named = self.options.path
        paths = [existing(item) for item in ([named] if isinstance(named, str) else named)]
        return [file for path in paths for file in (files_below(path) if path.is_dir() else [path])]

    def _urls(self, refused: Counter[str]) -> Iterator[str]:
        taken = 0
        for file in self._lists():
            with opened(file) as stream:
                for line in lines(stream):
                    if self.options.limit is not None and taken >= self.options.limit:
                        return
                    url = urldefrag(line.strip().decode("utf-8", "replace")).url
                    if not url:
                        continue
                    if reason := self._refusal(url):
                        refused[reason] += 1
                        continue
                    taken += 1
                    yield url

    def _refusal(self, url: str) -> str | None:
        """Return the reason not to request a URL; None if there is none."""
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").lower()
        except ValueError:
            return "no valid URL"
        if parts.scheme not in ("http", "https") or not host:
            return "no valid URL"
        ending = parts.path.rpartition("/")[2].rpartition(".")
        if ending[1] and ending[2].lower() in self.options.blocked_endings:
            return "blocked ending"
        if any(_within(host, domain) for domain in self.options.blocked_domains):
            return "blocked domain"
        if self.options.domains and not any(_within(host, domain) for domain in self.options.domains):
            return "other domain"
        return None

    def tasks(self) -> Iterator[Task]:
        base = sqlite3.connect(f"file:{self.pages}?mode=ro", uri=True)
        last = base.execute("SELECT COALESCE(MAX(id), 0) FROM pages").fetchone()[0]
        for start in range(1, last + 1, _IN_TASK):
            query = "SELECT COUNT(*), SUM(size) FROM pages WHERE state = 'ok' AND id >= ? AND id < ?"
            count, size = base.execute(query, (start, start + _IN_TASK)).fetchone()
            if count:
                key = f"{self.pages.name}-{start}-{count}-{size}"
                yield Task(key, size, (self.pages, start))
        base.close()

    def read(self, task: Task) -> Iterator[Document]:
        pages, start = task.payload
        base = sqlite3.connect(f"file:{pages}?mode=ro", uri=True)
        query = "SELECT url, kind, body FROM pages WHERE state = 'ok' AND id >= ? AND id < ? ORDER BY id"
        for url, kind, body in base.execute(query, (start, start + _IN_TASK)).fetchall():
            yield page_document(zlib.decompress(body), kind, url, url)
        base.close()


def _within(host: str, domain: str) -> bool:
    return host == domain.lower() or host.endswith("." + domain.lower())
