"""Inspect, merge and split prepared datasets."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from crosstrain import DataError
from crosstrain.data.indexed_dataset import TokenFile, TokenWriter
from crosstrain.data.prepared import Summary, locate
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils import storage
from crosstrain.utils.files import cache_folder

from .prepare import check_output, new_folder, output_lock, put
from .stats import BINS, bins, histogram

_SHOWN = 200  # tokens of a document
_CHUNK = 1 << 20


def inspect(path: str, document: int = 0, tokenizer: str | None = None) -> str:
    """Describe a prepared folder, or a pair of Megatron files, and show the beginning of one document as text.

    Every entry of the index is checked. DataError if one is wrong, or there is no such document.
    """
    prefix, folder = locate(path)
    file = TokenFile(prefix)
    file.verify()
    lines = [
        f"{file.prefix}: {file.num_documents:,} documents in {file.num_sequences:,} sequences, {file.num_tokens:,} "
        f"tokens ({file.dtype.name})"
    ]
    spec: str | Path | None = tokenizer
    if folder is not None:
        summary = Summary.read(folder)
        summary.check_tokenizer(folder)
        spec = tokenizer or folder / "tokenizer"
        lines += [
            f"made with {json.dumps(summary.options)}",
            f"vocabulary {summary.vocab_size:,}, end of text {summary.eod_id}, tokenizer {summary.tokenizer_sha256}",
            f"{summary.text_bytes:,} bytes were read, {summary.dropped:,} documents dropped",
        ]
    lengths = np.zeros(BINS, np.int64)
    for start in range(0, file.num_sequences, _CHUNK):
        lengths += histogram(file.sizes[start : start + _CHUNK])
    ranges = (f"{row['from']}-{row['to']}: {row['documents']:,}" for row in bins(lengths))
    lines.append("sequences by length: " + ", ".join(ranges))
    if not 0 <= document < max(file.num_documents, 1):
        raise DataError(f"{path} has documents 0 to {file.num_documents - 1}, no document {document}")
    if spec is None:
        lines.append("nothing says which tokenizer made it; --tokenizer shows a document as text")
    if file.num_documents:
        tokens = file.document(document)
        ids = tokens[:_SHOWN].tolist()
        text = " ".join(map(str, ids)) if spec is None else load_tokenizer(spec).decode(ids)
        begins = ", begins" if len(tokens) > _SHOWN else ""
        lines.append(f"document {document}, {len(tokens):,} tokens{begins}:\n{text}")
    return "\n".join(lines)


def merge(given: list[str], output: str | Path, *, overwrite: bool = False) -> Summary:
    """Write the documents of several prepared folders, one after another, into a new one.

    Raises DataError if they have different tokenizers, or `output` cannot be made.
    """
    parts = [_open(path) for path in given]
    _, folder, summary = parts[0]
    for path, (*_, other) in zip(given, parts, strict=True):
        if other.tokenizer_sha256 != summary.tokenizer_sha256:
            raise DataError(f"{path} was made with another tokenizer than {given[0]}: prepare both with the same one")
    files = [TokenFile(prefix) for prefix, *_ in parts]
    joined = replace(
        summary,
        options={"merged": [other.options for *_, other in parts]},
        dropped=sum(other.dropped for *_, other in parts),
        text_bytes=sum(other.text_bytes for *_, other in parts),
    )
    return _make(output, folder, joined, [(file, 0, file.num_documents) for file in files], overwrite)


def split(path: str, output: str | Path, shares: list[float]) -> list[tuple[str | Path, Summary]]:
    """Write folders output/part-0, part-1, ... with these shares of the documents of a prepared folder, in order.

    Raises DataError if a part would have no document, or cannot be made.
    """
    if min(shares) <= 0:
        raise DataError(f"a share must be more than 0, and --shares says {min(shares):g}")
    prefix, folder, summary = _open(path)
    file = TokenFile(prefix)
    ends = np.round(np.cumsum(shares) / sum(shares) * file.num_documents).astype(int).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    for number, (start, stop) in enumerate(bounds):
        if start == stop:
            raise DataError(
                f"part {number} would be empty: {shares[number]:g} of {sum(shares):g} shares of {file.num_documents} "
                f"documents come to none; give it at least {sum(shares) / max(file.num_documents, 1):.3g}"
            )
    made = list[tuple[str | Path, Summary]]()
    for number, (start, stop) in enumerate(bounds):
        options = {"split": summary.options, "documents": [start, stop]}
        name = f"part-{number}"
        target = storage.join(output, name) if isinstance(output, str) else output / name
        part = replace(summary, options=options, dropped=0, text_bytes=0)
        made.append((target, _make(target, folder, part, [(file, start, stop)], False)))
    return made


def _open(path: str) -> tuple[str | Path, Path, Summary]:
    prefix, folder = locate(path)
    if folder is None:
        raise DataError(f"{path} is not a folder that `crosstrain prepare` made, so its tokenizer is not known")
    summary = Summary.read(folder)
    summary.check_tokenizer(folder)
    return prefix, folder, summary


def _make(
    output: str | Path, like: Path, summary: Summary, parts: list[tuple[TokenFile, int, int]], overwrite: bool
) -> Summary:
    """Make a folder of parts (file, first document, end) with the tokenizer of `like`, complete or not at all."""
    check_output(output, overwrite)
    if isinstance(output, str):
        (cache := cache_folder("prepared")).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as place:
            summary = _make(Path(place, "made"), like, summary, parts, False)
            put(Path(place, "made"), output)
        return summary
    with output_lock(output), new_folder(output) as made:
        shutil.copytree(like / "tokenizer", made / "tokenizer")
        with TokenWriter(made / "tokens", np.dtype(summary.dtype)) as writer:
            for part in parts:
                writer.copy(*part)
        summary = replace(summary, documents=writer.num_documents, tokens=writer.num_tokens)
        summary.write(made)
    return summary
