"""Pages and files from a server: which are asked for, how politely, and that an interruption loses nothing."""

from __future__ import annotations

import bz2
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.prepare.download import download
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from crosstrain_plugins.builtin.commands.prepare.reader import FileReader
from crosstrain_plugins.builtin.commands.prepare.sources import InputSource
from crosstrain_plugins.builtin.datasets.prepared import Summary

from crosstrain.config.schema import Checker
from crosstrain.utils.errors import ConfigError, DataError
from fixtures_web import Server, server

__all__ = ["server"]  # a fixture

PROSE = "The lighthouse stands on a cliff above the harbour, and {0} ships pass it every night on their way south. "


def page(number: int) -> tuple[int, str, bytes]:
    article = "".join(f"<p>{PROSE.format(number) * 3}</p>" for _ in range(3))
    html = f"<html><body><nav><a href='/'>Menu</a></nav><article>{article}</article></body></html>"
    return 200, "text/html; charset=utf-8", html.encode()


def reader(path: Path, **more: Any) -> FileReader:
    return InputSource("urls", {"path": str(path), "delay": 0.0, "private_hosts": True, **more}, "urls").open()


def read(found: FileReader) -> dict[str, str]:
    return {document.source: document.text for task in found.tasks() for document in found.read(task)}


def test_the_main_text_of_the_pages_of_a_list(server: Server, tmp_path: Path) -> None:
    for n in range(5):
        server.content[f"/{n}"] = page(n)
    server.content["/plain"] = 200, "text/plain", b"Just text."
    urls = [server.url(f"/{n}") for n in range(5)]
    (tmp_path / "list.txt.bz2").write_bytes(
        bz2.compress("\n".join([*urls, "", urls[0] + "#part", server.url("/plain")]).encode())
    )
    found = reader(tmp_path / "list.txt.bz2")
    found.fetch(tmp_path / "fetched", False)
    texts = read(found)
    assert sorted(texts) == sorted([*urls, server.url("/plain")])
    assert texts[urls[3]].startswith("The lighthouse stands on a cliff above the harbour, and 3 ships")
    assert "Menu" not in texts[urls[3]]
    assert found.fetch_counts == {"ok": 6, "named more than once": 1}
    assert sorted(server.paths()) == sorted([f"/{n}" for n in range(5)] + ["/plain"])


def test_only_what_the_recipe_and_the_host_allow_is_asked_for(server: Server, tmp_path: Path) -> None:
    server.content |= {"/robots.txt": (200, "text/plain", b"User-agent: *\nDisallow: /private"), "/a": page(1)}
    lines = [
        server.url("/a"), server.url("/private/b"), server.url("/photo.JPG"), server.url("/a", "localhost"), "ftp://x/y",
        "no address", server.url("/missing"), "http://[broken",
    ]  # fmt: skip
    (tmp_path / "urls").mkdir()
    (tmp_path / "urls" / "list.txt").write_text("\n".join(lines))
    found = reader(tmp_path / "urls", blocked_domains=["localhost"])
    found.fetch(tmp_path / "fetched", False)
    assert sorted(server.paths()) == ["/a", "/missing"]
    assert found.fetch_counts == {
        "blocked ending": 1,
        "blocked domain": 1,
        "no valid URL": 3,
        "ok": 1,
        "robots.txt does not allow it": 1,
        "HTTP status 404": 1,
    }
    only = reader(tmp_path / "urls", domains=["example.org"])
    with pytest.raises(DataError, match=r"no page could be fetched from .*4 other domain"):
        only.fetch(tmp_path / "fetched", False)


def test_a_host_is_asked_one_thing_at_a_time_and_again_after_an_error(server: Server, tmp_path: Path) -> None:
    for n in range(4):
        server.content[f"/{n}"] = page(n)
    server.failures["/2"] = 1
    server.hold = 0.02  # requests at the same time would overlap
    (tmp_path / "list.txt").write_text("\n".join(server.url(f"/{n}") for n in range(4)))
    found = reader(tmp_path / "list.txt", delay=0.05, hosts=8)
    found.fetch(tmp_path / "fetched", False)
    assert found.fetch_counts == {"ok": 4}
    assert server.most_at_once == 1
    firsts = {path: when for path, when in reversed(server.seen)}
    assert min(b - a for a, b in pairwise(sorted(firsts.values()))) >= 0.05
    assert server.paths().count("/2") == 2


def test_an_interrupted_crawl_goes_on(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(6):
        server.content[f"/{n}"] = page(n)
    (tmp_path / "list.txt").write_text("\n".join(server.url(f"/{n}") for n in range(6)))
    found = reader(tmp_path / "list.txt")
    module = sys.modules[type(found).__module__]
    append, appended = module.append, []

    def until_three(path: Path, data: str) -> None:
        if len(appended) == 3:
            append(path, data[:20])  # a killed process may leave a part
            raise KeyboardInterrupt
        appended.append(data)
        append(path, data)

    monkeypatch.setattr(module, "append", until_three)
    with pytest.raises(KeyboardInterrupt):
        found.fetch(tmp_path / "fetched", False)
    monkeypatch.setattr(module, "append", append)
    again = reader(tmp_path / "list.txt")
    again.fetch(tmp_path / "fetched", False)
    assert again.fetch_counts == {"ok": 6}
    assert sorted(server.paths()) == sorted([*(f"/{n}" for n in range(6)), "/3"])  # the one that was under way
    assert len(read(again)) == 6


@pytest.mark.slow
def test_a_host_whose_rules_cannot_be_had_is_left_alone(server: Server, tmp_path: Path) -> None:
    server.failures["/robots.txt"] = 9
    server.content["/a"] = page(1)
    (tmp_path / "list.txt").write_text(server.url("/a"))
    with pytest.raises(DataError, match=r"no page could be fetched from .*: 1 robots\.txt does not allow it"):
        reader(tmp_path / "list.txt").fetch(tmp_path / "fetched", False)
    assert server.paths() == []


def test_addresses_of_a_local_network_are_not_asked(server: Server, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(server.url("/a"))
    with pytest.raises(DataError, match=r"no page could be fetched from .*: 1 robots\.txt"):
        reader(tmp_path / "list.txt", private_hosts=False).fetch(tmp_path / "fetched", False)
    assert server.seen == []


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="hosts: expected a whole number of at least 1, got 0"):
        InputSource("urls", {"path": "x", "hosts": 0}, "urls").open()


# ---- files


def test_a_broken_transfer_fetches_only_what_is_missing(server: Server, tmp_path: Path) -> None:
    content = bytes(range(256)) * 40
    server.content["/dump.bin"] = 200, "application/octet-stream", content
    server.cut = 3000
    path = download(server.url("/dump.bin"), tmp_path, False)
    assert path.read_bytes() == content
    assert len(server.seen) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["dump.bin"]
    assert download(server.url("/dump.bin"), tmp_path, False) == path
    assert len(server.seen) == 2


def test_an_interrupted_transfer_goes_on_unless_the_file_has_changed(server: Server, tmp_path: Path) -> None:
    url, content = server.url("/dump.bin"), b"the old one, " * 500
    server.content["/dump.bin"] = 200, "application/octet-stream", content
    server.failures["/dump.bin"] = 1
    with pytest.raises(DataError, match="cannot be fetched"):
        download(url, tmp_path, False)
    [part] = tmp_path.iterdir()
    part.write_bytes(b"-" * 3000)  # what an earlier process received
    assert download(url, tmp_path, False).read_bytes() == b"-" * 3000 + content[3000:]
    (tmp_path / "dump.bin").unlink()
    part.write_bytes(b"-" * 3000)
    server.etag = '"two"'
    server.content["/dump.bin"] = 200, "application/octet-stream", b"the new one"
    assert download(url, tmp_path, False).read_bytes() == b"the new one"


def test_a_server_that_refuses_is_named(server: Server, tmp_path: Path) -> None:
    server.content["/busy"], server.failures["/busy"] = page(1), 99
    for name, reason in (("none", "404"), ("busy", "503")):
        with pytest.raises(DataError, match=rf"/{name} cannot be fetched; the received part is kept.*{reason}"):
            download(server.url(f"/{name}"), tmp_path, False)


def test_an_address_is_an_input(server: Server, tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "{PROSE.format(n)}"}}\n' for n in range(30))
    server.content["/files/all.jsonl.bz2"] = 200, "application/octet-stream", bz2.compress(lines.encode())
    options = Checker(lambda key: ".".join(key)).dataclass(
        PrepareOptions,
        {"input": server.url("/files/all.jsonl.bz2"), "train_tokenizer": 300, "downloads": str(tmp_path / "kept")},
        (),
    )
    assert prepare(options, tmp_path / "out", False).documents == 30
    assert (tmp_path / "kept" / "all.jsonl.bz2").exists()
    assert Summary.read(tmp_path / "out").options["input"] == server.url("/files/all.jsonl.bz2")
