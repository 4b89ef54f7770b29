"""Files are read by their content and their ending, or refused; records without text are dropped or named."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from crosstrain_plugins.builtin.commands.prepare import io as corpus_io
from crosstrain_plugins.builtin.commands.prepare.conversation_files import rows
from crosstrain_plugins.builtin.commands.prepare.dedup import shingles
from crosstrain_plugins.builtin.commands.prepare.options import NearOptions, PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from crosstrain_plugins.builtin.readers import web_page
from hypothesis import given, settings
from hypothesis import strategies as st
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from crosstrain.config.schema import Component
from crosstrain.utils.errors import DataError
from crosstrain.utils.limited_process import LimitedProcess
from fixtures_corpus import documents, read


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---- endings and contents

gzipped = partial(gzip.compress, mtime=0)  # the time would be in the names of tests, which workers compare
ROW = b'{"text": "one"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jl", ROW), ("x.jsonlines", ROW), ("x.jsonl.1", ROW), ("x.jsonl-00001", ROW), ("x.json_0003", ROW),
        ("x.jsonl-00000-of-00010.gz", gzipped(ROW)), ("x.jsonl.gz.1", gzipped(ROW)), ("x.jsonl.gzip", gzipped(ROW)),
        ("x.txt", gzipped(b"one")), ("x.csv", gzipped(b"text\none\n")),
        ("x.txt.2", b"one"), ("x.csv", b"id,text\n1,one\n"), ("x.tsv", b"id\ttext\n1\tone\n"),
        ("x.csv", b"id;text\r\n1;one\r\n"), ("x.csv", b"\xef\xbb\xbftext,id\n\none,1\n"),
        ("x.json", b'[{"text": "one"}]'), ("x.json", b'\xef\xbb\xbf [\n {"text":\n "one"}]'),
        ("x.json", b'{"data": [{"text": "one"}]}'), ("x.json", b'{"version": 1, "data": [{"text": "one"}]}'),
        ("x.json", b'{\n "rows": [\n {"text": "one"}\n ]\n}'), ("x.json", b'{\n "text": "one"\n}\n'),
        ("x.jsonl", b'{"parts": [{"a": 1}], "text": "one"}\n'),
        ("x.txt", "one".encode("utf-16")), ("x.txt", "one".encode("utf-32")), ("x.txt", b"\xfe\xff\0o\0n\0e"),
        ("x.jsonl", ROW.decode().encode("utf-16")), ("x.json", '[{"text": "one"}]'.encode("utf-16")),
        ("x.csv", "text\none\n".encode("utf-16")),
    ],
)  # fmt: skip
def test_a_text_is_found_whatever_holds_it(tmp_path: Path, name: str, content: bytes) -> None:
    assert read(written(tmp_path / name, content)) == ["one"]
    assert read(tmp_path) == ["one"]


def packed_zip() -> bytes:
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("a.txt", "words")
    return packed.getvalue()


def packed_tar() -> bytes:
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("x.md", b"# words", "an unknown kind"), ("part-00000", b"words", "an unknown kind"),
        ("x.zip", packed_zip(), "unpack it"), ("x.tar.gz", gzipped(packed_tar()), "tar archive: unpack it"),
        ("x.pdf", b"%PDF-1.7 words", "PDF: extract its text"), ("x.txt", b"%PDF-1.7 words", "PDF"),
        ("x.txt", packed_zip(), "zip archive"), ("x.jsonl", packed_zip(), "zip archive"),
        ("x.txt.gz", gzipped(packed_tar()), "tar archive"), ("x.txt", b"\x89PNG\r\n\x1a\n", r"\(image\)"),
        ("x.txt.gz", gzipped(gzipped(b"words")), "decompress it once"),
        ("x.txt.gz", b"words that are not compressed", "damaged, or its content does not match its suffix"),
        ("x.txt", ROW, "name it .jsonl"), ("x.txt", b"<!DOCTYPE html><p>words", "name it .html"),
        ("x.txt", b"WARC/1.0\r\n", "name it .warc"), ("x.txt", b"<mediawiki>", "name it .xml"),
        ("x.csv", b"PAR1\0", "name it .parquet"), ("x.txt", b"{\\rtf1 words}", "RTF"),
        ("x.parquet", b"version https://git-lfs.github.com/spec/v1\noid 5", "git lfs pull"),
        ("x.txt", b"\x80\x04\x95words", "pickle"), ("x.txt", b"SQLite format 3\0", "SQLite"),
        ("x.txt", "wörter".encode("latin-1"), "not UTF-8 text: invalid at byte 1"),
        ("x.csv", "text\nwörter\n".encode("latin-1"), r"x\.csv:2 is not UTF-8 text: invalid at byte 1"),
        ("x.txt", "words".encode("utf-16-le"), "NUL"), ("x.txt", b"wor\0ds", "NUL"),
        ("x.txt", b"\xff\xfe\0\xd8a\0", "damaged"), ("x.jsonl", b'{"text": "wor\\u0000ds"}\n', r"x\.jsonl:1 .*NUL"),
        ("x.json", b'[{"text": "one"}, {"text": 5}]', r"x\.json:2 .*holds int"),
        ("x.json", b'{"data": [%s], "more": "%s"}' % (b", ".join([b"{}"] * 1000), b"x" * 10**6), "next to its list"),
        ("x.csv", b"text,text\none,two\n", "2 columns 'text': rename"),
        ("x.json", b'["one", "two"]', "it is a list"), ("x.json", b'[\n{"text": "one"\n]', "not JSON"),
        ("x.csv", b'id,text\n1,"words" more\n', r"x\.csv:2 is not a row"), ("x.csv", b"1,2\n", "no column 'text'"),
        ("x.csv", b"id,text\n1\n", r"x\.csv:2 has 1 values for 2 columns"),
        ("x.csv", b'id,text\n1,"never closed\n2,x\n', "not a row"),
    ],
)  # fmt: skip
def test_a_content_that_is_no_text_or_contradicts_its_ending_is_refused(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        read(written(tmp_path / name, content))


def test_a_named_reader_reads_any_ending_and_markup(tmp_path: Path) -> None:
    page = written(tmp_path / "page.html", b"<html>")
    assert read(Component("text", {"path": str(page)})) == ["<html>"]
    rows = written(tmp_path / "part-00000", ROW)
    assert read(Component("jsonl", {"path": str(rows)})) == ["one"]
    with pytest.raises(DataError, match="NUL"):
        read(Component("text", {"path": str(written(tmp_path / "x.tar", packed_tar()))}))


def test_files_of_a_folder_that_nothing_reads_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "b.md", "c.md"):
        written(tmp_path / name, b"words")
    assert read(tmp_path) == ["words"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: 2 files are not read, such as b.md: no reader supports that suffix"
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), st.integers()),
             min_size=1, max_size=8),
    st.sampled_from([",", ";", "\t"]),
)  # fmt: skip
def test_a_table_is_read_as_python_wrote_it(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int]], delimiter: str
) -> None:
    path = tmp_path_factory.mktemp("table") / "t.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([("text", "n"), *rows])
    assert [document.text for document in documents(str(path), text_key="text")] == [text for text, _ in rows]


def test_a_long_window_of_zstd_is_read(tmp_path: Path) -> None:
    options: Any = {zstd.CompressionParameter.window_log: 30, zstd.CompressionParameter.checksum_flag: 1}
    with zstd.open(tmp_path / "x.jsonl.zst", "wb", options=options) as file:
        file.write(ROW * 3)
    with pytest.raises(zstd.ZstdError), zstd.open(tmp_path / "x.jsonl.zst") as file:
        file.read()  # its window is longer than zstd reads by default
    assert read(tmp_path) == ["one"] * 3


# ---- records that cannot be used


def prepared(tokenizer: Path, given: Any, out: Path, **more: Any) -> dict[str, Any]:
    prepare(PrepareOptions(given, tokenizer=str(tokenizer), **more), out, progress=False)
    return json.loads((out / "report.json").read_text())["inputs"]


@pytest.mark.parametrize("rule", ["drop", "skip"])
def test_unusable_records_are_dropped_up_to_a_bound_and_counted(
    tokenizer: Path, tmp_path: Path, rule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.dumps({"text": f"words {n}", "id": n, "meta": {"a": 1}}) for n in range(18)]
    lines[3:3] = ['{"text": "half \\ud83d"}', '{"text": null}', '{"text": "cut']
    path = written(tmp_path / "x.jsonl", "\n".join(lines).encode())
    with pytest.raises(DataError, match=r"x\.jsonl:4 .*not UTF-8 text: invalid at byte 5, as '\\ud83d'"):
        prepared(tokenizer, str(path), tmp_path / "out")
    with pytest.raises(DataError, match=r"2 of 21 rows are dropped.*more than max_dropped=0.05"):
        prepared(tokenizer, str(path), tmp_path / "out", unusable=rule, max_dropped=0.05)
    caplog.clear()
    report = prepared(tokenizer, str(path), tmp_path / "out", unusable=rule)[str(path)]
    assert (report["documents"], report["blank"]) == (18, 1)
    assert report["rows"]["dropped"] == 2
    assert [place.partition(" ")[0] for place in report["rows"]["named"]] == [f"{path}:4:", f"{path}:6:"]
    assert report["rows"]["unread"]["id"] == [18, f"{path}:1"]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert f"id (18 of 21 rows, first in {path}:1)" in said
    assert "2 of 21 rows are dropped" in said
    caplog.clear()
    prepared(tokenizer, str(path), tmp_path / "quiet", unusable=rule, ignore_columns=["id", "meta"])
    assert "unused keys" not in caplog.text


def test_every_reader_drops_what_is_no_text(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    written(folder / "a.csv", b"text,n\n" + b"words,1\n" * 12 + b"w\xf6rter,2\nshort\n")
    written(folder / "b.txt", "wörter".encode("latin-1"))
    written(folder / "c.txt", b"wor\0ds")
    table = pyarrow.table({"text": ["words"] * 12 + ["a\0b", None], "n": [1] * 14})
    pyarrow.parquet.write_table(table, folder / "d.parquet")
    report = prepared(tokenizer, str(folder), tmp_path / "out", unusable="drop", max_dropped=0.2)[str(folder)]
    assert report["rows"]["dropped"] == 5
    assert report["documents"] == 24
    assert report["blank"] == 1
    assert report["rows"]["unread"] == {"n": [25, f"{folder}/a.csv:2"]}


@pytest.mark.parametrize("container", ["jsonl", "json", "csv", "parquet"])
def test_null_is_an_empty_text_in_every_container(tmp_path: Path, container: str) -> None:
    rows = [{"text": "one"}, {"text": None}]
    path = tmp_path / f"x.{container}"
    if container == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif container == "csv":
        path.write_text('text,n\none,1\n"",2\n')
    else:
        path.write_text(json.dumps(rows) if container == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    assert [document.text for document in documents(str(path), text_key="text")] == ["one", ""]


def test_near_duplicates_split_words_at_any_blank() -> None:
    texts = [blank.join(["one", "two", "three", "four"]) for blank in (" ", "\u00a0", "\u3000", "\u2003\t")]
    sets = [shingles(text, NearOptions(shingle=2)) for text in texts]
    assert len(sets[0]) == 3
    assert sets.count(sets[0]) == 4


# ---- bombs


def table_of(path: Path, value: str, count: int) -> Path:
    """A table of a single long value, which a dictionary holds once."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([value]))
    table = pyarrow.table({"text": column}).cast(pyarrow.schema([("text", column.type)]))
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
    return path


def test_a_parquet_file_that_becomes_gigabytes_is_refused(tmp_path: Path) -> None:
    bomb = table_of(tmp_path / "x.parquet", "x" * (8 << 20), 1000)
    assert bomb.stat().st_size < 1000
    with pytest.raises(DataError, match=r"x\.parquet (takes more than|expands to more than 250 times)"):
        read(bomb)
    small = table_of(tmp_path / "y.parquet", "x" * (1 << 20), 200)
    with pytest.raises(DataError, match=r"y\.parquet expands to more than 250 times its size"):
        read(small)
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.nulls(10_000_000, pyarrow.string())}), bomb)
    with pytest.raises(DataError, match=r"x\.parquet expands to more than 250 times"), corpus_io.table(bomb) as t:
        next(t.rows())
    assert read(table_of(tmp_path / "z.parquet", "words " * 1000, 100)) == ["words " * 1000] * 100


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_both_formats_of_arrow_are_read(tmp_path: Path, kind: str) -> None:
    table = pyarrow.table({"text": ["one", "two"]})
    path = str(tmp_path / "x.arrow")
    create = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
    with create(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table, max_chunksize=1)
    assert read(path) == ["one", "two"]


# ---- pages and archives

WORDS = "Café au lait is a good drink, and this is a paragraph that is long enough to be the main text of a page."
HTML = "<html><head><meta charset='{}'><title>t</title></head><body><nav>menu</nav><article><p>{}</p></article></html>"


@pytest.mark.parametrize("encoding", ["utf-8", "iso-8859-1", "utf-16", "windows-1252"])
def test_the_main_text_of_a_page_is_read_in_the_encoding_that_it_names(tmp_path: Path, encoding: str) -> None:
    page = HTML.format(encoding, WORDS).encode(encoding)
    assert read(written(tmp_path / "x.html", page)) == [WORDS]


def test_a_page_of_seven_bits_is_read_in_the_encoding_that_it_names(tmp_path: Path) -> None:
    text = "これは日本語の文章です。" * 9
    page = HTML.format("iso-2022-jp", text).encode("iso-2022-jp")
    assert read(written(tmp_path / "x.html", page)) == [text]


@pytest.mark.parametrize("before", ['<!-- <meta charset="iso-8859-1"> -->', '<script charset="iso-8859-1"></script>'])
def test_only_a_page_s_own_declaration_names_its_encoding(tmp_path: Path, before: str) -> None:
    text = "Это русский текст, и он достаточно длинный, чтобы быть главным текстом страницы. " * 2
    page = HTML.format("windows-1251", text).replace("<head>", f"<head>{before}").encode("windows-1251")
    assert read(written(tmp_path / "x.html", page)) == [text.strip()]


def test_a_page_whose_main_text_takes_too_long_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extract(page: str, **_: Any) -> str:
        while "endless" in page:
            pass
        return page

    monkeypatch.setattr("trafilatura.extract", extract)
    monkeypatch.setattr(web_page, "_limited", LimitedProcess(web_page._main_text, "finding it", seconds=0.2))
    found = [web_page.page_document(page, "text/html", "x") for page in (b"endless", b"short")]
    assert [document.text for document in found] == ["", "short"]
    assert found[0].unread[0].startswith("finding it took more than 0.2 s of CPU time")


def test_a_page_in_an_unknown_encoding_is_named_and_left_out(tmp_path: Path) -> None:
    wrong = HTML.format("utf-8", WORDS).encode("latin-1")
    [document] = documents(str(written(tmp_path / "x.htm", wrong)))
    assert (document.text, document.unread) == ("", ("page in an unknown encoding",))


def archive(path: Path) -> bytes:
    """A WARC file of a page, a plain text, a picture, a missing page, and a WET record."""
    page = gzipped(HTML.format("utf-8", WORDS).encode())
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(page), page)
    packing = [("Transfer-Encoding", "chunked"), ("Content-Encoding", "gzip")]
    pages: list[tuple[str, str, list[tuple[str, str]], bytes]] = [
        ("200 OK", "text/html", packing, chunked), ("200 OK", "text/plain; charset=iso-8859-1", [], b"Caf\xe9"),
        ("200 OK", "image/png", [], b"\x89PNG"), ("404 Not Found", "text/html", [], b"<p>missing"),
    ]  # fmt: skip
    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        writer.write_record(writer.create_warcinfo_record("x", {"software": "made"}))
        for number, (status, kind, more, body) in enumerate(pages):
            headers = StatusAndHeaders(status, [("Content-Type", kind), *more], protocol="HTTP/1.1")
            writer.write_record(
                writer.create_warc_record(f"http://h/{number}", "response", io.BytesIO(body), http_headers=headers)
            )
        extracted = io.BytesIO("Extrahiert ☃".encode())
        writer.write_record(
            writer.create_warc_record("http://h/w", "conversion", extracted, warc_content_type="text/plain")
        )
    return path.read_bytes()


@pytest.mark.parametrize("name", ["x.warc", "x.warc.gz", "x.warc.wet.gz"])
def test_archives_give_the_texts_of_their_pages_and_name_the_rest(tmp_path: Path, name: str) -> None:
    archive(tmp_path / name)
    found = list(documents(str(tmp_path / name)))
    assert [document.text for document in found if document.text] == [WORDS, "Café", "Extrahiert ☃"]
    assert found[1].source == f"{tmp_path / name}: http://h/0"
    assert [document.unread for document in found if document.unread] == [
        ("warcinfo of type application/warc-fields and status 200",),
        ("response of type image/png and status 200",),
        ("response of type text/html and status 404",),
    ]


def test_an_archive_cut_anywhere_is_named(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole.warc")
    starts = [place for place in range(len(whole)) if whole.startswith(b"WARC/1", place)]
    for length in range(1, len(whole) - 4, 61):
        if whole[length - 1 : length + 1].strip() and length not in starts:
            with pytest.raises(DataError, match=r"cut\.warc is damaged"):
                read(written(tmp_path / "cut.warc", whole[:length]))
    with pytest.raises(DataError, match="truncated"):
        read(written(tmp_path / "cut.warc.gz", gzipped(whole)[:-9]))


def test_a_table_whose_text_is_not_utf8_is_refused(tmp_path: Path) -> None:
    column = pyarrow.array([b"good", b"w\xf6rter"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet is not a readable Parquet file: .*can't decode byte 0xf6"):
        read(tmp_path)


def test_conversations_of_a_parquet_file_are_bounded_too(tmp_path: Path) -> None:
    bomb = table_of(tmp_path / "x.parquet", "x" * (8 << 20), 1000)
    with pytest.raises(DataError, match=r"x\.parquet (takes more than|expands to more than 250 times)"):
        list(rows([str(bomb)]))
