"""Read MediaWiki dumps: pages-articles.xml, compressed or not."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from crosstrain import Chunk, DataError, Document, FileReader, LimitedProcess, LimitError, registry, require
from crosstrain.utils import paths

from ..commands.prepare import io
from ..commands.prepare.reader import line_number, split_file

_END = b"</page>"
_RULES = yaml.safe_load((paths.home() / "configs" / "wikipedia" / "markup.yaml").read_text(encoding="utf-8"))
_SITE = 1 << 16  # number of bytes at the start of a dump to search for <siteinfo>
_TAGS = {"br": "\n"} | dict.fromkeys(
    (
        "table",
        "ref",
        "references",
        "gallery",
        "categorytree",
        "graph",
        "imagemap",
        "includeonly",
        "indicator",
        "inputbox",
        "mapframe",
        "maplink",
        "score",
        "section",
        "templatedata",
        "timeline",
    ),
    "",
)
_PARAMETER = re.compile(r"\{([^}]+)\}")
_FILE = re.compile(r"\.(jpe?g|png|svg|gif|tiff?|webp|xcf|webm|ogv|stl)$", re.IGNORECASE)
_SWITCH = re.compile(r"__[^\W\d_](?:[^\W_]|_(?!_))*__")  # behavior switches, such as __NOTOC__
_VARIANTS = re.compile(r"-\{(?:([^{}|]*)\|)?(?:\s*zh[\w-]*\s*:)?([^{};]*)[^{}]*\}-")  # -{zh-hans:软件; zh-hant:軟體}-


def _shown_text(given: tuple[str, frozenset[str]]) -> tuple[str, tuple[str, ...]]:
    """Return a page's text, and the templates that leave a gap in it; `given` is (markup, prefixes of hidden links)."""
    page = WikiPage(*given)
    return page.text, tuple(page.vanished)


@registry.register_reader("wikipedia")
class WikipediaReader(FileReader):
    """XML dumps of Wikipedia and other MediaWikis: one document per page, markup removed by mwparserfromhell."""

    suffixes = (".xml",)
    contents = ("MediaWiki dump", "XML document", "HTML page")

    @dataclass
    class Options(FileReader.Options):
        """Files to read, and the namespaces of the pages."""

        namespaces: list[int] = field(default_factory=lambda: [0])  # 0: articles, 1: talk, 10: templates, ...
        titles: bool = True  # start each document with the page's title

    options: Options
    shown = LimitedProcess(  # the parser takes hours on some pages of 100 KB
        _shown_text,
        "cannot be read: its markup",
        advice="remove the page, or drop such pages with unusable: drop",
    )

    def chunks(self, file: Path) -> Iterator[Chunk]:
        return split_file(file, _END)

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        namespaces = set(map(str, self.options.namespaces))
        for offset, raw in _pages(chunk):
            try:
                page = ElementTree.fromstring(raw)
            except ElementTree.ParseError as error:
                self.unusable(f"{chunk.file} at byte {offset}", f"begins a page that is not valid XML: {error}")
                continue
            if page.find("redirect") is not None or page.findtext("ns", "0") not in namespaces:
                continue
            title = page.findtext("title", "")
            # Reversed, so that max returns the last of equally new revisions.
            revisions = reversed(page.findall("revision"))
            newest = max(revisions, key=lambda found: found.findtext("timestamp", ""), default=page)
            model, form = newest.findtext("model", "wikitext"), newest.findtext("format", "text/x-wiki")
            if (model, form) != ("wikitext", "text/x-wiki"):
                yield Document("", f"{chunk.file}: {title}", (f"page of the model {model}, format {form}",))
                continue
            markup = newest.findtext("text", "")
            try:
                text, vanished = self.shown((markup, _hidden(chunk.file)), len(markup))
            except LimitError as error:
                self.unusable(f"{chunk.file}: {title}", str(error))
                continue
            if self.options.titles and text:
                text = f"{title}\n\n{text}"
            yield Document(text, f"{chunk.file}: {title}", vanished)


@lru_cache(maxsize=16)
def _hidden(file: Path) -> frozenset[str]:
    """Return prefixes of links to files, categories and other languages: well-known prefixes, and those in the dump."""
    with io.opened(file) as stream:
        head = stream.read(_SITE).partition(b"</siteinfo>")[0].decode(errors="replace")
    declared = re.findall(r'<namespace key="(?:6|14)"[^>]*>([^<]+)<', head)
    names = [*map(unescape, declared), "file", "image", *_RULES["categories"], *_RULES["languages"]]
    return frozenset(name.lower() for name in names)


def _pages(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the content, <page> element) of each page. Raises DataError for a truncated page."""
    data, at = chunk.read(), 0
    while (start := data.find(b"<page>", at)) >= 0:
        stop = data.find(_END, start)
        if stop < 0:
            line = line_number(chunk.file, chunk.start + start)
            raise DataError(f"{chunk.file}:{line} begins a page that does not end: the dump is truncated")
        at = stop + len(_END)
        yield chunk.start + start, data[start:at]
    if chunk.start == 0 and at == 0 and not chunk.read().lstrip().startswith(b"<mediawiki"):
        raise DataError(f"{chunk.file} is not a MediaWiki dump: it does not begin with <mediawiki>")


class WikiPage:
    """The text of a page, without tables, references, files, categories and most templates.

    hidden: prefixes of links that are not displayed, in lower case.
    """

    def __init__(self, markup: str, hidden: frozenset[str]) -> None:
        self.hidden, self.vanished = hidden, dict[str, None]()  # vanished: templates that leave a gap in a line
        text = self._plain(require("mwparserfromhell", "removing wiki markup").parse(markup))
        text = _SWITCH.sub(_shown, text)
        # Language variant rules with the flag H, T or - display no text.
        text = _VARIANTS.sub(lambda found: "" if set(found[1] or "") & set("HT-") else found[2], text)
        self.text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.strip() for line in text.split("\n"))).strip()

    def _plain(self, code: Any) -> str:
        parts = ["\n"]
        for node in code.nodes:
            if text := self._text(node, in_line=not parts[-1].endswith("\n")):
                parts.append(text)
        return re.sub(r"\n{3,}", "\n\n", "".join(parts).strip("\n"))

    def _text(self, node: Any, in_line: bool) -> str:
        match type(node).__name__:
            case "Template":
                return self._template(node, in_line)
            case "Wikilink":
                prefix, colon, rest = str(node.title).strip().partition(":")
                if colon and prefix and (prefix.strip().lower().replace("_", " ") in self.hidden or _FILE.search(rest)):
                    return ""
                return self._plain(node.title if node.text is None else node.text).removeprefix(":")
            case "Heading":
                return self._plain(node.title)
            case "Tag":
                tag = str(node.tag).strip().lower()
                if tag == "math":
                    return f"${str(node.contents).strip()}$"
                return _TAGS[tag] if tag in _TAGS else self._plain(node.contents) if node.contents else ""
        return str(node.__strip__(normalize=True, collapse=True, keep_template_params=False) or "")

    def _template(self, node: Any, in_line: bool) -> str:
        """Return the text of a template, and record the template if it leaves a gap in a line."""
        given = {str(each.name).strip(): self._plain(each.value).strip() for each in node.params}
        name, _, given[":"] = self._plain(node.name).strip().lower().replace("_", " ").partition(":")
        second = f"{name}|{given.get('2', '')}"
        keys = (
            f"{second}|{given.get('4')}",
            second,
            f"{name}#{sum(map(str.isdecimal, given))}",
            name if node.params else f"{name}()",
            name,
            f"{re.split('[-/]', name)[0]}-",
        )
        shown = next((text for key in keys if (text := _RULES["templates"].get(key)) is not None), None)
        places = _PARAMETER.findall(shown or "")
        used = [next(filter(None, map(given.get, names.split("|"))), "") for names in places]
        if (
            shown is None
            or (used and not any(used))
            or (name in _RULES["exact"] and given.keys() - {":", *"|".join(places).split("|")})
        ):
            if in_line:
                self.vanished[f"template {name}"] = None
            return ""
        return _PARAMETER.sub(lambda _: used.pop(0), shown)


def _shown(found: re.Match[str]) -> str:
    """Return a name between double underscores, or an empty string if it is in upper case and not a known macro."""
    return found[0] if found[0] != found[0].upper() or found[0] in _RULES["macros"] else ""
