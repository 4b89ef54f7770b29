"""Fetch the pages of a list of URLs politely, into one SQLite file."""

import http.client
import logging
import sqlite3
import threading
import urllib.error
import urllib.parse
import urllib.request
import urllib.robotparser
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from crosstrain.corpus.download import AGENT

from .web_page import TYPES

_BATCH = 10_000  # URLs put in at once
_LONGEST_WAIT = 120.0  # seconds, whatever a server asks for
_log = logging.getLogger(__name__)
_TABLE = """CREATE TABLE IF NOT EXISTS pages (
    id INTEGER PRIMARY KEY, url TEXT UNIQUE, host TEXT, state TEXT, kind TEXT, body BLOB, size INTEGER DEFAULT 0
)"""


@dataclass(frozen=True)
class CrawlOptions:
    """Limits on requests to hosts."""

    hosts: int  # visited at the same time, each by one connection
    delay: float  # seconds between two requests to a host; its robots.txt may ask for more
    timeout: float  # seconds for an answer
    retries: int  # after an error that may pass
    max_bytes: int  # of a page; longer ones are left out


class PageStore:
    """The SQLite file: a row per URL, in the order of the list. state: NULL, `ok`, or the reason for no page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.base = sqlite3.connect(path, check_same_thread=False)
        self.base.execute("PRAGMA journal_mode=WAL")
        self.base.execute(_TABLE)
        self.base.execute("CREATE INDEX IF NOT EXISTS waiting ON pages (host) WHERE state IS NULL")

    def add(self, urls: Iterable[str]) -> int:
        """Add new URLs; returns the number of those that were there already."""
        known, batch = 0, []
        for url in urls:
            batch.append((url, urllib.parse.urlsplit(url).netloc.lower()))
            if len(batch) >= _BATCH:
                known += self._add(batch)
                batch = []
        return known + self._add(batch)

    def _add(self, batch: list[tuple[str, str]]) -> int:
        with self.lock, self.base:
            before = self.base.total_changes
            self.base.executemany("INSERT OR IGNORE INTO pages (url, host) VALUES (?, ?)", batch)
            return len(batch) - (self.base.total_changes - before)

    def hosts(self) -> list[str]:
        """Return the hosts with pages to fetch."""
        with self.lock:
            return [row[0] for row in self.base.execute("SELECT DISTINCT host FROM pages WHERE state IS NULL")]

    def waiting(self, host: str) -> list[tuple[int, str]]:
        """Return (id, URL) of some pages of a host to fetch."""
        with self.lock:
            query = "SELECT id, url FROM pages WHERE state IS NULL AND host = ? ORDER BY id LIMIT 100"
            return self.base.execute(query, (host,)).fetchall()

    def settle(self, number: int, state: str, kind: str = "", body: bytes = b"") -> None:
        """Record the result for a page."""
        packed = zlib.compress(body) if body else None
        with self.lock, self.base:
            query = "UPDATE pages SET state = ?, kind = ?, body = ?, size = ? WHERE id = ?"
            self.base.execute(query, (state, kind, packed, len(body), number))

    def states(self) -> dict[str, int]:
        """Count the pages of each state."""
        with self.lock:
            query = "SELECT state, COUNT(*) FROM pages GROUP BY state ORDER BY COUNT(*) DESC"
            return {str(state): count for state, count in self.base.execute(query)}


def crawl(pages: PageStore, options: CrawlOptions, advance: Callable[[int], object]) -> None:
    """Fetch every page that has no state yet. One thread visits a host, one request after another."""
    stop = threading.Event()
    with ThreadPoolExecutor(options.hosts) as pool:
        visits = [pool.submit(_visit, host, pages, options, advance, stop) for host in pages.hosts()]
        try:
            for visit in visits:
                visit.result()
        except BaseException:
            stop.set()
            for visit in visits:
                visit.cancel()
            raise


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
    """Fetch a host's rules for robots (RFC 9309); all is allowed if it has none. None if the request fails."""
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
    """Return (state, content type, content) of a page, after retries where they may help."""
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
