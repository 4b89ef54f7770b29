"""Fetch the pages of a list of URLs politely into one SQLite file."""

import http.client
import sqlite3
import threading
import urllib.error
import urllib.parse
import urllib.request
import urllib.robotparser
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from crosstrain import PositiveInt, Text

from ..commands.prepare.download import AGENT
from .web_page import TYPES

_LONGEST_WAIT = 120.0  # maximum wait before a retry, in seconds
_TABLE = """CREATE TABLE IF NOT EXISTS pages (
    id INTEGER PRIMARY KEY, url TEXT UNIQUE, host TEXT, state TEXT, kind TEXT, body BLOB, size INTEGER DEFAULT 0
)"""


_NOT_TEXT = [
    "3gp", "7z", "ai", "aif", "apk", "app", "avi", "bin", "bmp", "bz2", "css", "csv", "dat", "deb", "dmg", "doc",
    "docx", "exe", "gif", "gifv", "gz", "iso", "jar", "jpeg", "jpg", "js", "json", "key", "log", "m4a", "m4v", "mid",
    "midi", "mov", "mp3", "mp4", "mpeg", "mpg", "ogg", "ogv", "otf", "pdf", "pkg", "png", "ppt", "pptx", "psd", "py",
    "rar", "rss", "rtf", "svg", "swf", "tar", "tif", "tiff", "ttf", "wav", "webm", "webp", "wma", "wmv", "woff",
    "woff2", "xls", "xlsx", "xml", "xz", "zip",
]  # fmt: skip


@dataclass
class CrawlOptions:
    """Pages to fetch, and limits on the requests. robots.txt is obeyed."""

    path: Text | list[Text]  # URL lists, compressed or not, or folders of them
    domains: list[Text] = field(default_factory=list)  # fetch only these domains and their subdomains; empty: all
    blocked_domains: list[Text] = field(default_factory=list)  # skip these domains and their subdomains
    blocked_endings: list[Text] = field(default_factory=lambda: list(_NOT_TEXT))  # skip these file extensions
    limit: PositiveInt | None = None  # maximum number of pages, from the start of the list; None: no limit
    hosts: Annotated[int, Interval(ge=1, le=1024)] = 16  # hosts to fetch from in parallel, one connection each
    # seconds between two requests to a host; its robots.txt may require more
    delay: Annotated[float, Interval(ge=0, le=86_400)] = 1.0
    timeout: Annotated[float, Interval(gt=0, le=86_400)] = 30.0  # seconds to wait for a response
    retries: Annotated[int, Interval(ge=0, le=100)] = 3  # retries after a temporary error
    max_bytes: Annotated[int, Interval(ge=1, le=2**31)] = 10_000_000  # larger pages are skipped


class PageStore:
    """The SQLite file of pages: one row per URL, in list order.

    The column `state` is NULL (not fetched), `ok`, or the reason for a failure.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.base = sqlite3.connect(path, check_same_thread=False)
        self.base.execute("PRAGMA journal_mode=WAL")
        self.base.execute(_TABLE)
        self.base.execute("CREATE INDEX IF NOT EXISTS waiting ON pages (host) WHERE state IS NULL")

    def add(self, urls: Iterable[str]) -> int:
        """Add new URLs, and return the number of URLs that were already stored."""
        known, query = 0, "INSERT OR IGNORE INTO pages (url, host) VALUES (?, ?)"
        with self.lock, self.base:
            for url in urls:
                known += 1 - self.base.execute(query, (url, urllib.parse.urlsplit(url).netloc.lower())).rowcount
        return known

    def hosts(self) -> list[str]:
        """Return the hosts that have pages to fetch."""
        with self.lock:
            return [row[0] for row in self.base.execute("SELECT DISTINCT host FROM pages WHERE state IS NULL")]

    def waiting(self, host: str) -> list[tuple[int, str]]:
        """Return (id, URL) of up to 100 pages to fetch from a host."""
        with self.lock:
            query = "SELECT id, url FROM pages WHERE state IS NULL AND host = ? ORDER BY id LIMIT 100"
            return self.base.execute(query, (host,)).fetchall()

    def settle(self, number: int, state: str, kind: str = "", body: bytes = b"") -> None:
        """Store the result of a page."""
        packed = zlib.compress(body) if body else None
        with self.lock, self.base:
            query = "UPDATE pages SET state = ?, kind = ?, body = ?, size = ? WHERE id = ?"
            self.base.execute(query, (state, kind, packed, len(body), number))

    def states(self) -> dict[str, int]:
        """Count the pages by state."""
        with self.lock:
            query = "SELECT state, COUNT(*) FROM pages GROUP BY state ORDER BY COUNT(*) DESC"
            return {str(state): count for state, count in self.base.execute(query)}


def crawl(pages: PageStore, options: CrawlOptions, advance: Callable[[int], object]) -> None:
    """Fetch every page without a state. Each host has one thread, and one request at a time."""
    stop = threading.Event()
    with ThreadPoolExecutor(options.hosts) as pool:
        visits = pool.map(lambda host: _visit(host, pages, options, advance, stop), pages.hosts())
        try:
            list(visits)  # an error cancels visits that have not started
        finally:
            stop.set()


def _visit(
    host: str, pages: PageStore, options: CrawlOptions, advance: Callable[[int], object], stop: threading.Event
) -> None:
    rules: dict[str, urllib.robotparser.RobotFileParser | None] = {}
    while todo := pages.waiting(host):
        for number, url in todo:
            if stop.is_set():
                return
            scheme = urllib.parse.urlsplit(url).scheme
            if scheme not in rules:
                rules[scheme] = _robots(f"{scheme}://{host}/robots.txt", options)
                stop.wait(options.delay)
            robots = rules[scheme]
            if robots is None or not robots.can_fetch(AGENT, url):
                pages.settle(number, "robots.txt does not allow it")
            else:
                state, kind, body = _page(url, options, stop)
                pages.settle(number, state, kind, body)
                stop.wait(max(options.delay, float(robots.crawl_delay(AGENT) or 0)))
            advance(1)


def _robots(url: str, options: CrawlOptions) -> urllib.robotparser.RobotFileParser | None:
    """Fetch a host's robots.txt (RFC 9309); None if the request fails.

    All URLs are allowed if the host has none.
    """
    robots = urllib.robotparser.RobotFileParser(url)
    try:
        with _open(url, options) as answer:
            robots.parse(answer.read(512 << 10).decode("utf-8", "replace").splitlines())
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            return None
        robots.parse([])
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return robots


def _page(url: str, options: CrawlOptions, stop: threading.Event) -> tuple[str, str, bytes]:
    """Fetch a page, with retries after temporary errors, and return (state, content type, content)."""
    state = "no answer"
    for attempt in range(options.retries + 1):
        if attempt:
            stop.wait(min(options.delay * 2**attempt, _LONGEST_WAIT))
        try:
            with _open(url, options) as answer:
                kind = answer.headers.get_content_type()
                if kind not in TYPES:
                    return f"is {kind}", "", b""
                body = answer.read(options.max_bytes + 1)
                if len(body) > options.max_bytes:
                    return "is too large", "", b""
                return ("ok", answer.headers.get("Content-Type", kind), body) if body else ("is empty", "", b"")
        except urllib.error.HTTPError as error:
            state = f"the server says {error.code}"
            if error.code < 500 and error.code not in (408, 425, 429):
                return state, "", b""
            asked = str(error.headers.get("Retry-After", ""))
            stop.wait(min(float(asked), _LONGEST_WAIT) if asked.isdecimal() else 0)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            state = f"no answer ({type(reason).__name__})"
        except ValueError:
            return "is no valid URL", "", b""
    return state, "", b""


def _open(url: str, options: CrawlOptions) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": AGENT})
    return urllib.request.urlopen(request, timeout=options.timeout)
