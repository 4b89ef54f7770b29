"""Read the main text of the pages in lists of URLs."""

import hashlib
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

from tqdm import tqdm

from crosstrain import DataError, Document, Reader, Task, registry, require

from ..commands.prepare.io import existing, files_below, opened, pieces
from .crawl import CrawlOptions, PageStore, crawl
from .web_page import page_document

_IN_TASK = 256  # pages per task


@registry.register_reader("urls")
class UrlListReader(Reader):
    """Lists of URLs, one per line, fetched politely: the main text of each page, extracted by trafilatura."""

    Options = CrawlOptions
    options: CrawlOptions
    pages: Path  # the SQLite file

    def fetch(self, folder: Path, progress: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        chosen = repr(self.options).encode() + b"".join(str(f.stat().st_mtime_ns).encode() for f in self._lists())
        self.pages = folder / f"pages-{hashlib.blake2b(chosen, digest_size=8).hexdigest()}.sqlite"
        require("trafilatura", "reading lists of URLs")
        refused: Counter[str] = Counter()
        pages = PageStore(self.pages)
        known = pages.add(islice(self._urls(refused), self.options.limit))
        states = pages.states()
        total, todo = sum(states.values()), states.get("None", 0)
        with tqdm(desc="fetch pages", total=total, initial=total - todo, unit=" pages", disable=not progress) as bar:
            try:
                crawl(pages, self.options, bar.update)
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
        for file in self._lists():
            with opened(file) as stream:
                for line in pieces(stream, b"\n"):
                    url = urldefrag(line.strip().decode("utf-8", "replace")).url
                    if url and (reason := self._refusal(url)):
                        refused[reason] += 1
                    elif url:
                        yield url

    def _refusal(self, url: str) -> str | None:
        """Return the reason for skipping a URL, or None to fetch it."""
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").lower()
        except ValueError:
            return "no valid URL"
        _, dot, ending = parts.path.rpartition("/")[2].rpartition(".")
        reasons = {
            "no valid URL": parts.scheme not in ("http", "https") or not host,
            "blocked ending": dot and ending.lower() in self.options.blocked_endings,
            "blocked domain": any(_within(host, domain) for domain in self.options.blocked_domains),
            "other domain": self.options.domains and not any(_within(host, d) for d in self.options.domains),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

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
