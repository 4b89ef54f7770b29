"""What is read as which documents, what is refused and where."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sysconfig
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from crosstrain_plugins.builtin.commands.prepare import reader
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conftest import TEXTS, json_lines
from crosstrain.config.schema import Component
from crosstrain.utils.errors import DataError
from fixtures_corpus import documents, read
from fixtures_web import PAGE


def test_the_standard_library_is_always_there_in_the_same_order() -> None:
    texts = list(islice((d.text for d in documents("stdlib")), 300))
    assert texts == list(islice((d.text for d in documents("stdlib")), 300))
    assert (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text() in texts


def test_text_files_are_documents_in_sorted_order_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    for name, text in {"c.txt": "last", "b/deep/z.txt": "second", "a.txt": "first\r\n"}.items():
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "blank.txt").write_text(" \n ")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert read(tmp_path) == ["first\r\n", "second", "last"]
    assert read(tmp_path / "c.txt", tmp_path / "b") == ["last", "second"]


def test_json_lines_and_parquet_give_the_chosen_field(tmp_path: Path) -> None:
    json_lines(tmp_path / "1.jsonl", TEXTS, key="body")
    with open(tmp_path / "1.jsonl", "a") as file:
        file.write("\n")  # a blank line is nothing
    pyarrow.parquet.write_table(pyarrow.table({"body": ["p", None, "q"], "n": [1, 2, 3]}), tmp_path / "2.parquet")
    assert read(tmp_path, key="body") == [*TEXTS, "p", "q"]


@settings(deadline=None)
@given(st.text(alphabet="ab\n☃", max_size=60), st.integers(1, 7))
def test_a_separator_cuts_a_text_file_wherever_chunks_end(
    tmp_path_factory: pytest.TempPathFactory, text: str, chunk: int
) -> None:
    file = tmp_path_factory.mktemp("cut") / "t.txt"
    file.write_bytes(b"\xef\xbb\xbf" + ("a\n\n" + text).encode())  # editors put a byte order mark first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "TASK_BYTES", chunk)
        expected = [part for part in ("a\n\n" + text).split("\n\n") if part and not part.isspace()]
        assert [part.removeprefix("\ufeff") for part in read(file, separator="\n\n")] == expected


def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complaint(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as error:
            read(tmp_path / name)
        return str(error.value)

    monkeypatch.setattr(reader, "TASK_BYTES", 4)
    good = b'{"text": "fine"}\n'
    assert "bad.txt is not UTF-8 text: invalid at byte 9" in complaint("bad.txt", "☃☃☃".encode() + b"\xff!")
    assert "cut.txt is not UTF-8 text: invalid at byte 6" in complaint("cut.txt", "☃☃☃".encode()[:-1])
    assert "b.jsonl:2 is not UTF-8 text: invalid at byte 27" in complaint("b.jsonl", good + b'{"text": "\xff"}\n')
    assert "c.jsonl:3 is not a JSON object" in complaint("c.jsonl", good + good + b'{"text": "cut')
    assert "it has 'body', 'url'; set text_key" in complaint("d.jsonl", b'{"body": "x", "url": "u"}\n')
    assert "e.jsonl:1" in complaint("e.jsonl", b'["text"]\n')
    assert "f.jsonl:2" in complaint("f.jsonl", good + b'{"text": 5}\n')
    assert "g.jsonl:1" in complaint("g.jsonl", b'{"text": "half a pair \\ud83d"}\n')
    assert "h.parquet is not a readable Parquet file" in complaint("h.parquet", b"PAR1 not at all")


def test_parquet_without_the_column_says_which_there_are(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["p"], "n": [1]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="no column 'text'; it has body, n"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"column 'n' of .* holds int"):
        read(tmp_path, key="n")


def test_an_input_that_gives_nothing_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        read(tmp_path / "nowhere")
    (tmp_path / "page.md").write_text("text")
    with pytest.raises(DataError, match=r"holds no \.arrow, .* or \.xml file \(found: 1 with \.md\)"):
        read(tmp_path)
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no \.arrow,.*found: nothing"):
        read(tmp_path / "good.txt", tmp_path / "empty")  # one good input does not excuse the other


# ---- cutting and compression

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd.compress,
}  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=9), max_size=12), st.sampled_from([b"\n", b"ab", b"aa", b"</page>"]), st.integers(1, 30)
)
def test_pieces_join_to_the_file_and_end_behind_separators(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], separator: bytes, size: int
) -> None:
    content = separator.join(parts)
    assume(not content.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")))  # UTF-16 and UTF-32 are converted
    folder = tmp_path_factory.mktemp("cut")
    for name, packed in {"plain": content, "packed.gz": gzip.compress(content)}.items():
        (folder / name).write_bytes(packed)
        found = list(reader.split_file(folder / name, separator, size))
        assert b"".join(chunk.read() for chunk in found) == content
        assert [chunk.start for chunk in found[1:]] == [chunk.stop for chunk in found[:-1]]
        assert all(len(chunk.read()) >= size and chunk.read().endswith(separator) for chunk in found[:-1])
        apart = [part for chunk in found for part in chunk.read().split(separator) if part]
        assert apart == [part for part in content.split(separator) if part]


@pytest.mark.parametrize("ending", PACKERS)
def test_compressed_files_are_read_like_plain_ones(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "TASK_BYTES", 100)
    texts = [f"text {i}" for i in range(50)]
    plain = json_lines(tmp_path / "plain.jsonl", texts).read_bytes()
    pack = PACKERS[ending]
    (tmp_path / f"all.jsonl{ending}").write_bytes(pack(plain[:800]) + pack(plain[800:]))  # two streams in a row
    assert read(tmp_path / f"all.jsonl{ending}") == texts
    (tmp_path / f"one.txt{ending}").write_bytes(pack(b"whole"))
    assert read(tmp_path / f"one.txt{ending}") == ["whole"]
    (tmp_path / f"bad.jsonl{ending}").write_bytes(pack(plain.replace(b'"text 2"', b"nothing")))
    with pytest.raises(DataError, match=rf"bad\.jsonl{ending}:3 is not a JSON object"):
        read(tmp_path / f"bad.jsonl{ending}")


@pytest.mark.parametrize("ending", PACKERS)
def test_truncated_and_damaged_archives_are_named(tmp_path: Path, ending: str) -> None:
    packed = PACKERS[ending](b'{"text": "a"}\n' * 5000)
    file = tmp_path / f"x.jsonl{ending}"
    file.write_bytes(packed[:-7])
    with pytest.raises(DataError, match=rf"x\.jsonl{ending} is truncated"):
        read(file)
    file.write_bytes(b"no archive at all, whatever its name says")
    with pytest.raises(DataError, match=rf"x\.jsonl{ending} is damaged, or its content does not match its suffix"):
        read(file)


def test_what_no_reader_claims_is_read_as_text_where_its_reader_is_named(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# words")
    with pytest.raises(DataError, match=r"page\.md is of an unknown kind.*\{name: text, path: .*page\.md\}"):
        read(tmp_path / "page.md")
    assert read(Component("text", {"path": str(tmp_path / "page.md")})) == ["# words"]


# ---- Wikipedia

MARKUP = """{{Infobox|name=nothing}}'''NAME''' is a [[town|small town]] &amp; more.&lt;ref&gt;A book.&lt;/ref&gt;
[[File:map.png|thumb|A map of [[Europe]]]]
== History ==
* It was [[founded]] long ago.
{| class="wikitable"
| gone
|}
[[Category:Towns]]
"""


def dump(path: Path, titles: list[str]) -> Path:
    """A dump with an article per title, a redirect and a page of talk."""
    pages = [PAGE.format(title=title, ns=0, text=MARKUP.replace("NAME", title)) for title in titles]
    pages.append(PAGE.format(title="Old", ns=0, text="#REDIRECT").replace("<ns>", '<redirect title="A" /><ns>'))
    pages.append(PAGE.format(title="Talk:A", ns=1, text="chatter"))
    head = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">\n  <siteinfo></siteinfo>\n'
    path.write_bytes(PACKERS.get(path.suffix, bytes)((head + "".join(pages) + "</mediawiki>\n").encode()))
    return path


@pytest.mark.parametrize("name", ["wiki.xml", "wiki.xml.bz2"])
def test_articles_of_a_dump_lose_their_markup(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TASK_BYTES", 500)
    titles = [f"Town {i}" for i in range(20)]
    texts = read(dump(tmp_path / name, titles))
    assert [text.partition("\n")[0] for text in texts] == titles
    assert texts[3] == "Town 3\n\nTown 3 is a small town & more.\n\nHistory\nIt was founded long ago."


def test_a_dump_that_ends_early_or_is_none_is_named(tmp_path: Path) -> None:
    file = dump(tmp_path / "wiki.xml", ["A", "B"])
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"wiki\.xml:\d+ begins a page that does not end: the dump is truncated"):
        read(file)
    (tmp_path / "other.xml").write_text("<html></html>")
    with pytest.raises(DataError, match="is not a MediaWiki dump"):
        read(tmp_path / "other.xml")
    (tmp_path / "broken.xml").write_text("<mediawiki>\n" + PAGE.format(title="A", ns=0, text="<b>") + "</mediawiki>")
    with pytest.raises(DataError, match=r"broken\.xml:2 begins a page that is not valid XML"):
        read(tmp_path / "broken.xml")


# ---- datasets on disk


def test_hugging_face_datasets_on_disk(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"text": ["a", "b", None], "n": [1, 2, 3]})
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "extra": table.select([0])}).save_to_disk(str(tmp_path / "several"))
    assert read(tmp_path / "one") == ["a", "b"]
    assert read(tmp_path / "several") == ["a", "a", "b"]  # extra, then train
    with pytest.raises(DataError, match="has no column 'body'; it has text, n"):
        read(tmp_path / "one", key="body")
    table.save_to_disk(str(tmp_path / "again"), num_shards=3)
    table.select([1]).save_to_disk(str(tmp_path / "again"))  # leaves two files of the earlier dataset
    assert read(tmp_path / "again") == ["b"]


def test_other_programs_have_files_with_the_names_of_a_dataset_on_disk(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"text": "b"}')
    (tmp_path / "a.txt").write_text("a")
    assert read(tmp_path) == ["a", "b"]
