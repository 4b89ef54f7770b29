"""Read dumps of a MediaWiki: pages-articles.xml, compressed or not."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from crosstrain import Chunk, DataError, Document, FileReader, registry, require
from crosstrain.corpus.reader import line_number, split_file

_END = b"</page>"


@registry.register_reader("wikipedia")
class WikipediaReader(FileReader):
    """XML dumps of Wikipedia and other MediaWikis: a document per page, its markup taken off by mwparserfromhell."""

    suffixes = (".xml",)

    @dataclass
    class Options(FileReader.Options):
        """Files to read, and the namespaces of pages."""

        namespaces: list[int] = field(default_factory=lambda: [0])  # 0: articles; 1: talk, 10: templates, ...
        titles: bool = True  # the page's title is its first line

    options: Options

    def chunks(self, file: Path) -> Iterator[Chunk]:
        return split_file(file, _END)

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        for offset, raw in _pages(chunk):
            try:
                page = ElementTree.fromstring(raw)
            except ElementTree.ParseError as error:
                line = line_number(chunk.file, offset)
                raise DataError(f"{chunk.file}:{line} begins a page that is not valid XML: {error}") from None
            namespace = page.findtext("ns", "0")
            if page.find("redirect") is not None or int(namespace) not in self.options.namespaces:
                continue
            title = page.findtext("title", "")
            text = plain_text(page.findtext("revision/text", ""))
            if text:
                yield Document(f"{title}\n\n{text}" if self.options.titles else text, f"{chunk.file}: {title}")


def _pages(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the content, <page> element) of each page. DataError if one is cut off."""
    data, at = chunk.read(), 0
    while (start := data.find(b"<page>", at)) >= 0:
        stop = data.find(_END, start)
        if stop < 0:
            line = line_number(chunk.file, chunk.start + start)
            raise DataError(f"{chunk.file}:{line} begins a page that does not end: the dump is truncated")
        at = stop + len(_END)
        yield chunk.start + start, data[start:at]
    if chunk.start == 0 and at == 0 and not chunk.read().lstrip().startswith(b"<mediawiki"):
        raise DataError(f"{chunk.file} is no dump of a MediaWiki: it does not begin with <mediawiki>")


def plain_text(markup: str) -> str:
    """Return the paragraphs of a page without templates, tables, references, files and categories."""
    parser = require("mwparserfromhell", "taking the markup off wiki pages")
    code = parser.parse(markup)
    for link in code.filter_wikilinks():
        prefix, colon, _ = str(link.title).partition(":")
        if colon and prefix.strip().lower() in ("file", "image", "category"):
            _remove(code, link)
    for tag in code.filter_tags(matches=lambda node: str(node.tag).strip().lower() in ("ref", "table", "gallery")):
        _remove(code, tag)
    text = code.strip_code(normalize=True, collapse=True, keep_template_params=False)
    lines = (line.strip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _remove(code: object, node: object) -> None:
    with suppress(ValueError):  # it stood in one that is gone already
        code.remove(node)  # type: ignore[attr-defined]
