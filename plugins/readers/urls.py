"""Fetch pages from lists of URLs into one file, and read the main text of each page."""

import base64
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import Event, Lock
from typing import Annotated, Any
from urllib.parse import urldefrag, urljoin, urlsplit
from urllib.robotparser import RobotFileParser

from annotated_types import Interval
from tqdm import tqdm

from crosstrain import Chunk, DataError, Document, FileReader, PositiveInt, Text, registry, require, split_file
from crosstrain.utils.files import append

from ..commands.prepare import io
from ..commands.prepare.download import AGENT
from ..commands.prepare.shards import key_of
from .web_page import TYPES, page_document

_NOT_TEXT = [
    "3gp", "7z", "ai", "aif", "apk", "app", "avi", "bin", "bmp", "bz2", "css", "csv", "dat", "deb", "dmg", "doc",
    "docx", "exe", "gif", "gifv", "gz", "iso", "jar", "jpeg", "jpg", "js", "json", "key", "log", "m4a", "m4v", "mid",
    "midi", "mov", "mp3", "mp4", "mpeg", "mpg", "ogg", "ogv", "otf", "pdf", "pkg", "png", "ppt", "pptx", "psd", "py",
    "rar", "rss", "rtf", "svg", "swf", "tar", "tif", "tiff", "ttf", "wav", "webm", "webp", "wma", "wmv", "woff",
    "woff2", "xls", "xlsx", "xml", "xz", "zip",
]  # fmt: skip


@registry.register_reader("urls")
class UrlListReader(FileReader):
    """Lists of URLs, one per line: the main text of each page, fetched and extracted by trafilatura."""

    @dataclass
    class Options:
        """Pages to fetch. robots.txt is obeyed."""

        path: Text | list[Text]  # URL lists, compressed or not, or folders of such lists
        domains: list[Text] = field(default_factory=list)  # fetch only these domains and their subdomains; empty: all
        blocked_domains: list[Text] = field(default_factory=list)  # skip these domains and their subdomains
        blocked_endings: list[Text] = field(default_factory=lambda: list(_NOT_TEXT))  # skip files with these extensions
        limit: PositiveInt | None = None  # maximum number of pages, from the start of the list; None: no limit
        hosts: Annotated[int, Interval(ge=1, le=1024)] = 16  # hosts to fetch from in parallel, one connection each
        # seconds between two requests to a host; the host's robots.txt may require more
        delay: Annotated[float, Interval(ge=0, le=86_400)] = 1.0
        private_hosts: bool = False  # also fetch from addresses of this machine and of local networks

    options: Options

    def fetch(self, folder: Path, progress: bool) -> None:
        """Fetch the pages of the listed URLs that are not yet in the page file.

        The page file has one JSON object per line, with url and state; if the state is "ok", also with type and body.
        """
        library = require("trafilatura", "reading lists of URLs")
        lock, refused = Lock(), Counter[str]()
        urls = list(islice(self._urls(refused), self.options.limit))
        pages = folder / f"pages-{key_of(urls)[:16]}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        pages.touch()
        self.known_files = [pages]
        states = {page["url"]: page["state"] for chunk in self.chunks(pages) for page in _pages(chunk)}
        waiting = [url for url in dict.fromkeys(urls) if url not in states]
        with tqdm(desc="fetch pages", total=len(waiting), unit=" pages", disable=not progress) as bar:

            def settle(page: dict[str, str]) -> None:
                with lock:
                    append(pages, f"\n{json.dumps(page)}")  # \n ends a line that a killed process left incomplete
                    states[page["url"]] = page["state"]
                    bar.update()

            _Crawl(library, self.options, settle).run(waiting)
        self.fetch_counts = {**refused, **Counter(states.values())}
        if repeated := len(urls) - len(states):
            self.fetch_counts["named more than once"] = repeated
        if not self.fetch_counts.get("ok"):
            reasons = (
                ", ".join(f"{count} {reason}" for reason, count in self.fetch_counts.items()) or "the lists are empty"
            )
            raise DataError(f"no page could be fetched from {self.options.path}: {reasons}")

    def _urls(self, refused: Counter[str]) -> Iterator[str]:
        paths = map(io.existing, self._paths)
        for file in chain.from_iterable(io.files_below(path) if path.is_dir() else [path] for path in paths):
            with io.opened(file) as stream:
                for line in io.pieces(stream, b"\n"):
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

    def chunks(self, file: Path) -> Iterator[Chunk]:
        return split_file(file, b"\n")

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        for page in _pages(chunk):
            if page["state"] == "ok":
                body = zlib.decompress(base64.b64decode(page["body"]))
                yield page_document(body, page["type"], page["url"], page["url"])


def _pages(chunk: Chunk) -> Iterator[dict[str, str]]:
    for line in chunk.read().splitlines():
        with suppress(ValueError):  # an empty line, or a line that a killed process left incomplete
            yield json.loads(line)


def _within(host: str, domain: str) -> bool:
    return host == domain.lower() or host.endswith("." + domain.lower())


class _Crawl:
    """Fetches pages with trafilatura: from several hosts in parallel, but one page at a time from each host."""

    def __init__(
        self, trafilatura: Any, options: UrlListReader.Options, settle: Callable[[dict[str, str]], object]
    ) -> None:
        """settle: called for each page with its url and state; for a page with text, also with its type and body."""
        self.options, self.settle, self.stop = options, settle, Event()
        config, protection = trafilatura.settings.use_config(), "off" if options.private_hosts else "on"
        config["DEFAULT"].update({"USER_AGENTS": AGENT, "INSECURE_SSL_FALLBACK": "off", "SSRF_PROTECTION": protection})
        # fetch_response retries after temporary errors, and returns None if there is no answer.
        self.answer = partial(trafilatura.fetch_response, with_headers=True, config=config)

    def run(self, urls: list[str]) -> None:
        by_host: dict[str, list[str]] = {}
        for url in urls:
            by_host.setdefault(urlsplit(url).netloc.lower(), []).append(url)
        with ThreadPoolExecutor(self.options.hosts) as pool:
            try:
                list(pool.map(self._visit, by_host.values()))  # an error cancels visits that have not started
            finally:
                self.stop.set()

    def _visit(self, urls: list[str]) -> None:
        robots = self._robots(urljoin(urls[0], "/robots.txt"))
        delay = max(self.options.delay, float(robots.crawl_delay(AGENT) or 0))
        for url in urls:
            if not robots.can_fetch(AGENT, url):
                self.settle({"url": url, "state": "robots.txt does not allow it"})
            elif not self.stop.wait(delay):
                self.settle({"url": url, **self._page(url)})

    def _robots(self, url: str) -> RobotFileParser:
        """Fetch a host's robots.txt (RFC 9309). If fetching fails, allow no page; without the file, allow all pages."""
        answer, robots = self.answer(url), RobotFileParser(url)
        status = 500 if answer is None else answer.status
        robots.parse(answer.data.decode("utf-8", "replace").splitlines() if status == 200 else [])
        robots.disallow_all = status >= 500
        return robots

    def _page(self, url: str) -> dict[str, str]:
        answer = self.answer(url)
        if answer is None:
            return {"state": "no answer"}
        content_type = (answer.headers or {}).get("content-type", "text/plain")
        kind = content_type.partition(";")[0].strip().lower()
        if answer.status != 200:
            return {"state": f"HTTP status {answer.status}"}
        if kind not in TYPES:
            return {"state": f"content type {kind}"}
        return {"state": "ok", "type": content_type, "body": base64.b64encode(zlib.compress(answer.data)).decode()}
