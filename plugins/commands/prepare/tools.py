"""Inspect prepared datasets."""

import json
from pathlib import Path

from crosstrain import DataError, load_tokenizer

from ...datasets.indexed_dataset import TokenFile
from ...datasets.prepared import Summary, locate

_SHOWN = 200  # maximum number of tokens of a document to show


def inspect(path: str, document: int = 0, tokenizer: str | None = None) -> str:
    """Describe a prepared folder, or a pair of Megatron files, and show the beginning of one document as text.

    All entries of the index are checked. Raises DataError if an entry is wrong, or if the document does not exist.
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
    if not 0 <= document < max(file.num_documents, 1):
        raise DataError(f"{path} has no document {document}; expected 0 to {file.num_documents - 1}")
    if spec is None:
        lines.append("its tokenizer is unknown; give --tokenizer to show documents as text")
    if file.num_documents:
        tokens = file.document(document)
        ids = tokens[:_SHOWN].tolist()
        text = " ".join(map(str, ids)) if spec is None else load_tokenizer(spec).decode(ids)
        begins = ", begins" if len(tokens) > _SHOWN else ""
        lines.append(f"document {document}, {len(tokens):,} tokens{begins}:\n{text}")
    return "\n".join(lines)
