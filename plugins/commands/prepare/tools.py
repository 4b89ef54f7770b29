"""Inspect and merge prepared datasets."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from crosstrain import DataError
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils.files import cache_folder

from ...datasets.indexed_dataset import TokenFile, TokenWriter
from ...datasets.prepared import Summary, locate
from .prepare import check_output, new_folder, output_lock, put
from .stats import BINS, bins, histogram

_SHOWN = 200  # number of tokens shown of a document
_CHUNK = 1 << 20


def inspect(path: str, document: int = 0, tokenizer: str | None = None) -> str:
    """Describe a prepared folder, or a pair of Megatron files, and show the beginning of one document as text.

    Every entry of the index is checked. Raises DataError if one is wrong, or if the document does not exist.
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
    """Concatenate the documents of several prepared folders into a new folder, completely or not at all.

    Raises DataError if they have different tokenizers, or `output` cannot be made.
    """
    check_output(output, overwrite)
    if isinstance(output, str):
        (cache := cache_folder("prepared")).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as place:
            summary = merge(given, Path(place, "made"))
            put(Path(place, "made"), output)
        return summary
    parts = [_open(path) for path in given]
    _, folder, first = parts[0]
    for path, (*_, other) in zip(given, parts, strict=True):
        if other.tokenizer_sha256 != first.tokenizer_sha256:
            raise DataError(f"{path} was made with another tokenizer than {given[0]}: prepare both with the same one")
    with output_lock(output), new_folder(output) as made:
        shutil.copytree(folder / "tokenizer", made / "tokenizer")
        with TokenWriter(made / "tokens", np.dtype(first.dtype)) as writer:
            for file, *_ in parts:
                writer.copy(file, 0, file.num_documents)
        summary = replace(
            first,
            options={"merged": [other.options for *_, other in parts]},
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            dropped=sum(other.dropped for *_, other in parts),
            text_bytes=sum(other.text_bytes for *_, other in parts),
        )
        summary.write(made)
    return summary


def _open(path: str) -> tuple[TokenFile, Path, Summary]:
    prefix, folder = locate(path)
    if folder is None:
        raise DataError(f"{path} is not a folder that `crosstrain prepare` made, so its tokenizer is not known")
    summary = Summary.read(folder)
    summary.check_tokenizer(folder)
    return TokenFile(prefix), folder, summary
