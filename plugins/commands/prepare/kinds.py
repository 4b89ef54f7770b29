"""Recognize the kind of a file by the first bytes of its content."""

import re
from pathlib import Path

from . import io

_UNPACK = "unpack it, and name the files inside"
_CONVERT = "extract its text into .txt, .jsonl or .parquet files first"
# Name -> (regular expression for the beginning, advice if the reader does not accept this kind). First match wins.
_KINDS = {
    "Git LFS pointer": (rb"version https://git-lfs", "fetch the content with `git lfs pull`"),
    "PDF": (rb"%PDF-", _CONVERT),
    "zip archive": (rb"PK(\x03\x04|\x05\x06)", f"{_UNPACK}; of a document, {_CONVERT}"),
    "tar archive": (rb".{257}ustar", _UNPACK),
    "7z archive": (rb"7z\xbc\xaf\x27\x1c", _UNPACK),
    "RAR archive": (rb"Rar!\x1a\x07", _UNPACK),
    "compressed file": (
        rb"\x1f[\x8b\x9d]|BZh[1-9]1AY|\xfd7zXZ|\x28\xb5\x2f\xfd|\x04\x22\x4d\x18",
        "decompress it once",
    ),
    "picture": (
        rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|BM.{12}[\x0c\x28\x6c\x7c]\0\0\0|II\*\0|MM\0\*",
        _CONVERT,
    ),
    "sound or film": (rb"ID3|OggS|fLaC|RIFF....(WAVE|AVI )|.{4}ftyp|\x1a\x45\xdf\xa3", _CONVERT),
    "program": (rb"\x7fELF|MZ.{62}|\xca\xfe\xba\xbe|\xcf\xfa\xed\xfe|\0asm", _CONVERT),
    "SQLite database": (rb"SQLite format 3\0", _CONVERT),
    "HDF5 file": (rb"\x89HDF\r\n", _CONVERT),
    "NumPy array": (rb"\x93NUMPY", _CONVERT),
    "pickle": (rb"\x80[\x02-\x05][}\]c(\x8c\x95]", _CONVERT),
    "Word document": (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _CONVERT),
    "RTF document": (rb"\{\\rtf", _CONVERT),
    "PostScript": (rb"%!PS", _CONVERT),
    "Parquet table": (rb"PAR1", "name it .parquet"),
    "Arrow table": (
        rb"ARROW1\0\0|\xff{4}.\x01\0\0\x10\0\0\0",
        "write it as Parquet, or name the folder of save_to_disk",
    ),
    "Avro table": (rb"Obj\x01", "write it as Parquet"),
    "ORC table": (rb"ORC", "write it as Parquet"),
    "ARC archive": (rb"filedesc://", "convert it to WARC, with `warcio recompress`"),
    "WARC archive": (rb"WARC/\d", "name it .warc"),
    "MediaWiki dump": (rb"\s*(<\?xml[^>]*>\s*)?<mediawiki", "name it .xml"),
    "HTML page": (rb"(?i)\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype html|html|head|body)\b", "name it .html"),
    "XML document": (rb"\s*<(\?xml|svg|rss|TEI)\b", _CONVERT),
    "JSON document": (rb'\s*(\[\s*)?\{\s*"[^"\n]*"\s*:', "name it .jsonl"),
}


def kind_of(file: Path) -> tuple[str, str]:
    """Return (name, advice) for the kind of a file's content; `("", "")` for plain text and unknown kinds.

    Raises DataError if the file cannot be read.
    """
    with io.opened(file) as stream:
        head = stream.read(io.HEAD).removeprefix(b"\xef\xbb\xbf")
    return next(
        ((name, advice) for name, (sign, advice) in _KINDS.items() if re.match(sign, head, re.DOTALL)), ("", "")
    )
