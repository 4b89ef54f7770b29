"""Read the main text of web pages: HTML files, web archives, and pages fetched by other readers."""

import re
from collections.abc import Iterator
from contextlib import redirect_stderr
from email.message import Message
from io import StringIO
from typing import Any

from crosstrain import Chunk, DataError, Document, FileReader, LimitedProcess, LimitError, registry, require

from ..commands.prepare import io

TYPES = ("text/html", "application/xhtml+xml", "text/plain")  # content types of pages with text
_CHARSET = re.compile(rb"""<(?:meta|\?xml)\b[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w:.-]+)""", re.IGNORECASE)
_LOOK = 2048  # number of bytes at the start of a page to search for its encoding
_MOST = 64 << 20  # maximum size of a page in an archive, in bytes
# Encodings that browsers use instead of the declared ones.
_READ_AS = {
    "iso-8859-1": "cp1252", "latin1": "cp1252", "latin-1": "cp1252", "us-ascii": "cp1252", "ascii": "cp1252",
    "iso-8859-9": "cp1254", "iso-8859-11": "cp874", "tis-620": "cp874", "gb2312": "gb18030", "gbk": "gb18030",
    "shift_jis": "cp932", "shift-jis": "cp932", "x-sjis": "cp932", "euc-kr": "cp949", "ks_c_5601-1987": "cp949",
    "big5": "big5hkscs",
}  # fmt: skip


@registry.register_reader("html")
class HtmlReader(FileReader):
    """HTML files: the main text of each file, extracted by trafilatura."""

    suffixes = (".html", ".htm", ".xhtml")
    contents = ("HTML page", "XML document")

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        yield page_document(chunk.read(), "text/html", str(chunk.file))


@registry.register_reader("warc")
class WarcReader(FileReader):
    """WARC and WET files: one document per page; the main text of HTML is extracted by trafilatura."""

    suffixes = (".warc", ".wet")
    contents = ("WARC archive",)

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        warcio = require("warcio.archiveiterator", "reading web archives")
        number, end = 0, 0
        with io.opened(chunk.file) as stream:
            archive = warcio.ArchiveIterator(stream)
            try:
                for number, record in enumerate(archive, 1):
                    document = _page(record, f"{chunk.file}: {record.rec_headers.get_header('WARC-Target-URI')}")
                    with redirect_stderr(StringIO()):  # warcio prints errors instead of raising them
                        archive.read_to_end()
                    size, end = record.rec_headers.get_header("Content-Length"), archive.offset
                    if (
                        not record.rec_type
                        or size != str(record.length)
                        or record.raw_stream.limit
                        or archive.err_count
                    ):
                        raise EOFError(f"the length of record {number} does not match its header")
                    yield document
                if archive.fh.tell() != end:
                    raise EOFError(f"the record after record {number} is incomplete")
            except (warcio.ArchiveLoadFailed, AttributeError, ValueError, EOFError) as error:
                raise DataError(f"{chunk.file} is damaged ({error}): fetch it again") from None


def page_document(content: bytes, content_type: str, source: str, url: str | None = None) -> Document:
    """Return a page as a document: plain text is unchanged; HTML is reduced to its main text, which may be empty.

    content_type: value of the HTTP header. The document is empty if the page is neither in Unicode nor in its declared
    encoding, or if finding its main text takes too long.
    """
    header = Message()
    header["Content-Type"] = content_type
    named = _CHARSET.search(re.sub(rb"(?s)<!--.*?-->", b"", content[:_LOOK]))
    names = (
        "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig",
        header.get_content_charset(),
        named and named[1].decode("ascii", "replace").lower(),
    )
    # Text in iso-2022-jp is also valid UTF-8, because it consists of ASCII characters.
    for name in sorted(names, key=lambda name: name != "iso-2022-jp"):
        try:
            text = content.decode(_READ_AS.get(name or "", name or "utf-8"))
        except (UnicodeDecodeError, LookupError):
            continue
        if header.get_content_type() == "text/plain":
            return Document(text, source)
        require("trafilatura", "reading HTML")  # imported here, so that its import is not part of a page's time
        try:
            return Document(_limited((text, url), len(text)), source)
        except LimitError as error:
            return Document("", source, (str(error),))
    return Document("", source, ("page in an unknown encoding",))


def _main_text(given: tuple[str, str | None]) -> str:
    """Return the main text of a page; `given` is (HTML, address)."""
    html, url = given
    return require("trafilatura", "reading HTML").extract(html, url=url, include_comments=False) or ""


_limited = LimitedProcess(_main_text, "finding the main text of a page", advice="remove the page")


def _page(record: Any, source: str) -> Document:
    """Return a record as a document; empty if the record is not a page with text."""
    http = record.http_headers
    kind = str((http or record.rec_headers).get_header("Content-Type"))
    content_type, status = kind.partition(";")[0].strip().lower(), http.get_statuscode() if http else "200"
    if record.rec_type not in ("response", "resource", "conversion") or status != "200" or content_type not in TYPES:
        return Document("", source, (f"{record.rec_type} of type {content_type} and status {status}",))
    content = record.content_stream().read(_MOST + 1)
    if len(content) > _MOST:
        return Document("", source, (f"page of more than {_MOST >> 20} MiB",))
    return page_document(content, kind, source, record.rec_headers.get_header("WARC-Target-URI"))
