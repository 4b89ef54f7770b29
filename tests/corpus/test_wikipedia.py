"""Pages of MediaWikis in several languages against texts written by hand; revisions, models and namespaces."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pytest
from crosstrain_plugins.builtin.commands.prepare import reader, sources
from crosstrain_plugins.builtin.datasets.row_audit import RowAudit
from crosstrain_plugins.builtin.readers.wikipedia import WikiPage

from crosstrain.utils import limited_process
from crosstrain.utils.errors import DataError
from fixtures_corpus import documents, read

# ruff: noqa: RUF001

SITES = {
    "en": ("File", "Category"), "de": ("Datei", "Kategorie"), "fr": ("Fichier", "Catégorie"),
    "ja": ("ファイル", "Category"), "zh": ("File", "Category"),
}  # fmt: skip


def page(title: str, *revisions: str, ns: int = 0) -> str:
    return f"<page><title>{title}</title><ns>{ns}</ns><id>1</id>{''.join(revisions)}</page>\n"


def revision(text: str, time: str = "2020-01-01T00:00:00Z", model: str = "wikitext", form: str = "text/x-wiki") -> str:
    return (
        f"<revision><id>1</id><timestamp>{time}</timestamp><model>{model}</model><format>{form}</format>"
        f'<text xml:space="preserve">{escape(text)}</text></revision>'
    )


def dump(path: Path, site: str, *pages: str) -> Path:
    file, category = SITES[site]
    head = (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">\n<siteinfo><namespaces>'
        f'<namespace key="0" case="first-letter" /><namespace key="6" case="first-letter">{file}</namespace>'
        f'<namespace key="14" case="first-letter">{category}</namespace></namespaces></siteinfo>\n'
    )
    path.write_text(head + "".join(pages) + "</mediawiki>\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("site", "markup", "right"),
    [
        (
            "en",
            "{{Infobox river|length={{convert|5|km}}}}\n__NOTOC__\nThe '''Foo''' is {{convert|5|km|mi|abbr=on}} long, "
            "{{convert|3|to|4|m}} wide and {{nowrap|{{formatnum:12345}} m}} deep.{{sfn|Bar|2000}} {{As of|2020}}, it "
            "is called {{lang|fr|rivière}}, {{abbr|a.k.a.|also known as}} {{Frac|1|2}}. Its energy is "
            "<math>E=mc^2</math>.\n"
            "[[File:map.png|thumb|A [[map]] of it]][[Category:Rivers]]\n[[fr:Rivière]]\n[[zh-yue:河]]\n"
            "See [[:fr:Rivière|the French page]], [[:Category:Rivers]] and [[wikt:foo|foo]].<br>Code has __init__ and "
            "__FILE__.",
            "The Foo is 5 km long, 3 to 4 m wide and 12345 m deep. As of 2020, it is called rivière, a.k.a. 1/2. Its "
            "energy is $E=mc^2$.\n\nSee the French page, Category:Rivers and foo.\nCode has __init__ and __FILE__.",
        ),
        (
            "de",
            "__KEIN_INHALTSVERZEICHNIS__'''Köln''' ({{frS|Cologne}}) liegt am [[Rhein]], {{Höhe|53|DE-NHN}} hoch.\n"
            "[[Datei:dom.jpg|mini|hochkant|Der [[Kölner Dom|Dom]]]]\n[[Bild:alt.png|mini|alt]]\nNach {{§|1|BGB}} gilt "
            "{{nowrap|{{formatnum:1000000}} €}}.\n[[Kategorie:Stadt]]\n[[en:Cologne]]",
            "Köln (französisch Cologne) liegt am Rhein, 53 m hoch.\n\nNach § 1 BGB gilt 1000000 €.",
        ),
        (
            "fr",
            "'''Lyon''' compte {{unité|500000|habitants}} au {{s|XIX}}, le {{date|1|janvier|1850}}.\n"
            "[[Fichier:lyon.jpg|vignette|gauche|La ville]]\n[[Image:b.svg|vignette|b]]\nLe {{1er}} maire, "
            "{{Lien|langue=en|trad=John Doe|texte=Jean Dupont}}, dit {{langue|en|hello}} au 2{{e}} tour.\n"
            "[[Catégorie:Ville]][[Category:Ville]]__AUCUNSOMMAIRE__",
            "Lyon compte 500000 habitants au XIXe siècle, le 1 janvier 1850.\n\nLe 1er maire, Jean Dupont, dit hello "
            "au 2e tour.",
        ),
        (
            "ja",
            "__目次強制__'''東京'''（{{読み仮名|東京|とうきょう}}、{{lang-en|Tokyo}}）は[[日本]]の都市で、"
            "{{仮リンク|都庁|en|City Hall}}がある。\n[[ファイル:tokyo.jpg|サムネイル|右|都市]]"
            "\n[[画像:b.png|thumb|b]]\n[[カテゴリ:都市]]\n[[Category:都市]]",
            "東京（東京（とうきょう）、Tokyo）は日本の都市で、都庁がある。",
        ),
        (
            "zh",
            "'''软件'''（{{lang|en|software}}）是-{zh-hans:软件; zh-hant:軟體}-，见"
            "{{link-en|程序|Program}}-{H|zh-cn:甲;zh-tw:乙}-和-{原文}-。\n[[文件:a.jpg|缩略图|说明]]\n[[分类:软件]]\n[[分類:軟體]]\n__无目录__",
            "软件（software）是软件，见程序和原文。",
        ),
    ],
)  # fmt: skip
def test_pages_of_five_languages_become_the_text_that_they_show(
    tmp_path: Path, site: str, markup: str, right: str
) -> None:
    path = dump(tmp_path / "x.xml", site, page("T", revision(markup)))
    assert read(path) == [f"T\n\n{right}"]


def test_the_newest_revision_counts_wherever_it_stands(tmp_path: Path) -> None:
    old, new = revision("old", "2001-05-05T00:00:00Z"), revision("new", "2019-05-05T00:00:00Z")
    path = dump(tmp_path / "x.xml-p1p400", "en", page("A", old, new), page("B", new, old), page("C", new, new))
    assert read(path) == ["A\n\nnew", "B\n\nnew", "C\n\nnew"]


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("wikibase-item", "application/json"), ("css", "text/css"), ("javascript", "text/javascript"),
        ("Scribunto", "text/plain"), ("sanitized-css", "text/css"), ("json", "application/json"),
        ("wikitext", "text/css"), ("flow-board", "application/json"),
    ],
)  # fmt: skip
def test_pages_that_are_no_wikitext_are_named_and_left_out(tmp_path: Path, model: str, form: str) -> None:
    path = dump(tmp_path / "x.xml", "en", page("A", revision("a { color: red }", model=model, form=form)))
    [document] = documents(str(path))
    assert (document.text, document.unread) == ("", (f"page of the model {model}, format {form}",))


def test_templates_that_leave_a_gap_in_a_sentence_are_named(tmp_path: Path) -> None:
    markup = (
        "{{Infobox|a=b}}\nIt weighs {{weight of|it}} and {{citation|title=T}} more{{sfn|A}}.\n{{Navbox}}\n"
        "* {{flag icon}} F"
    )
    [document] = documents(str(dump(tmp_path / "x.xml", "en", page("A", revision(markup)))))
    assert document.text == "A\n\nIt weighs  and  more.\n\nF"
    assert document.unread == ("template weight of", "template citation", "template sfn", "template flag icon")


def test_one_broken_page_is_dropped_where_the_recipe_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TASK_BYTES", 300)
    path = dump(
        tmp_path / "x.xml", "en", page("A", revision("a")), page("<b>", revision("b")), page("C", revision("c"))
    )
    with pytest.raises(DataError, match=r"x\.xml:4 begins a page that is not valid XML"):
        read(path)
    [source] = sources.sources(str(path), {})
    found = source.open()
    found.drops = RowAudit()
    assert [text.text for task in found.tasks() for text in found.read(task)] == ["A\n\na", "C\n\nc"]
    assert found.drops.plain["dropped"] == 1


@pytest.mark.parametrize("unit", ["<ref ", "<div>"])
def test_a_page_that_the_parser_does_not_finish_is_one_dropped_record(
    unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dump(tmp_path / "dump.xml", "en", page("A", revision(unit * 30_000)), page("B", revision("b")))
    [source] = sources.sources(str(path), {})
    found = source.open()
    monkeypatch.setattr(limited_process, "_PER_SECOND", 1e6)
    monkeypatch.setattr(found.shown, "_seconds", 0.5)
    with pytest.raises(DataError, match=r"dump\.xml: A cannot be read: its markup took more than 0\.\d s of CPU time"):
        list(found.read(next(found.tasks())))
    found.drops = RowAudit()
    assert [text.text for task in found.tasks() for text in found.read(task)] == ["B\n\nb"]
    assert found.drops.plain["dropped"] == 1


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("{{frac|2|1|2}}", "2 1/2"),
        ("{{sfrac|1|2}}", "1/2"),
        ("{{convert|5|by|10|by|3|m}}", "5 by 10 by 3 m"),
        ("{{convert|5|to about|10|km}}", "5 to about 10 km"),
        ("{{convert|10|-|20|to|30|km}}", "10–20 to 30 km"),
        ("{{gaps|1|234|567|8|9|10}}", "12345678910"),
        ("{{val|1.5|u=m}}", "1.5 m"),
        # Left out and counted, because the number would become another one.
        ("{{val|6.02|e=23|u=kg}}", ""),
        ("{{val|1.5|0.2|u=m}}", ""),
        ("{{ordinal|3}}", ""),
    ],
)
def test_numbers_stay_what_they_are_or_are_left_out(markup: str, text: str) -> None:
    page = WikiPage(f"It is {markup} long.", frozenset())
    assert page.text == f"It is {text} long."
    assert bool(page.vanished) == (text == "")
