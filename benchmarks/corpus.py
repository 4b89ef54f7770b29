"""Compare near-duplicate search and random reads with plain implementations, and measure the time to the first batch.

    python benchmarks/corpus.py [--quick] [--parts near read start] [--rounds 5]

The corpus is five copies of the Python standard library as JSON lines (--quick: one copy). In all copies except the
first, the lines of each document are shuffled. Crosstrain's near-duplicate search uses all cores, and datasketch uses
one process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import ROOT, Result, ratio, rounds, standard_library, table

sys.path.insert(0, str(ROOT / "platform"))

from crosstrain_plugins.builtin.commands.prepare.options import DedupOptions, NearOptions
from crosstrain_plugins.builtin.commands.prepare.pool import cores
from crosstrain_plugins.builtin.commands.prepare.shards import CorpusShard
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenFile, TokenWriter

WORDS = 5  # words in a shingle


def make_corpus(folder: Path, copies: int) -> int:
    """Write `corpus.jsonl`, and return the bytes of text."""
    texts = [text for text in standard_library() if text.strip()]
    rng, size = random.Random(0), 0
    with open(folder / "corpus.jsonl", "w") as file:
        for copy in range(copies):
            for text in texts:
                lines = text.splitlines(keepends=True)
                if copy:  # new documents with the same words, so that no cache helps
                    rng.shuffle(lines)
                text = "".join(lines)
                size += len(text.encode())
                file.write(json.dumps({"text": text}) + "\n")
    return size


def read_corpus(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text().splitlines()]


# ---- near-duplicates


def our_near(folder: Path) -> Result:
    """Find near-duplicates with Crosstrain, from texts in memory, including the intermediate files."""
    from crosstrain_plugins.builtin.commands.prepare.dedup import find_duplicates

    texts = read_corpus(folder)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        started, size = time.perf_counter(), max(1, len(texts) // (4 * cores()))
        shards = [CorpusShard(Path(name), str(k)) for k in range(0, len(texts), size)]
        for k, shard in enumerate(shards):
            _write(shard, texts[k * size : (k + 1) * size])
        options = DedupOptions(exact=True, near=NearOptions(shingle=WORDS))
        gone, _ = find_duplicates(options, shards, cores(), lambda count: None)
        seconds = time.perf_counter() - started
        return {"documents_per_second": len(texts) / seconds, "dropped": float(sum(map(len, gone)))}


def _write(shard: CorpusShard, texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    hashes = [hashlib.blake2b(text, digest_size=16).hexdigest() for text in encoded]
    report = {"lengths": list(map(len, encoded)), "hashes": hashes, "sources": [shard.key] * len(texts)}
    with shard.writing(report) as file:
        file.writelines(encoded)


def datasketch(folder: Path) -> Result:
    """Find near-duplicates with MinHash and MinHashLSH, as in the documentation of datasketch."""
    from datasketch import MinHash, MinHashLSH

    texts = read_corpus(folder)
    started, dropped = time.perf_counter(), 0
    index = MinHashLSH(threshold=0.8, num_perm=128)
    for number, text in enumerate(texts):
        words = text.lower().split()
        found = MinHash(num_perm=128)
        found.update_batch([" ".join(words[k : k + WORDS]).encode() for k in range(max(1, len(words) - WORDS + 1))])
        if index.query(found):
            dropped += 1
        else:
            index.insert(str(number), found)
    return {"documents_per_second": len(texts) / (time.perf_counter() - started), "dropped": float(dropped)}


def near(folder: Path, count: int) -> None:
    ways = {"near": our_near, "datasketch": datasketch}
    found = rounds(list(ways), lambda way: ways[way](folder), count)
    rows = [["datasketch, one process", ratio(found["near"], found["datasketch"], "documents_per_second")]]
    print(table(["near-duplicates, documents/s against", "ratio"], rows))
    print("dropped:", {name: results[0]["dropped"] for name, results in found.items()}, "\n")


# ---- reading


def read(folder: Path, count: int, length: int = 1024, samples: int = 20_000) -> None:
    """Read random samples as int64 inputs and labels, through the dataset and from a bare memmap."""
    from crosstrain.config.registry import registry

    tokens = np.random.default_rng(0).integers(0, 30_000, 50_000_000, dtype=np.uint16)
    with TokenWriter(folder / "random", np.uint16) as writer:
        (folder / "tokens").write_bytes(tokens.tobytes())
        writer.append(np.full(50, 1_000_000), folder / "tokens")
    cls = registry.get("dataset", "text")
    dataset = cls(cls.Options(path=str(folder / "random"), seq_length=length, split=[1.0, 0.0, 0.0]), "train")
    mapped = np.memmap(folder / "random.bin", np.uint16, "r")
    order = np.random.default_rng(1).integers(0, len(dataset), samples).tolist()
    rng = np.random.default_rng(0)

    def through_dataset() -> None:
        for index in order:
            dataset.get(index, rng)

    def plainly() -> None:
        for index in order:
            window = mapped[index * length : index * length + length + 1].astype(np.int64)
            _ = {"input_ids": window[:-1], "labels": window[1:]}

    def timed(work: Callable[[], None]) -> Result:
        started = time.perf_counter()
        work()
        return {"samples_per_second": samples / (time.perf_counter() - started)}

    ways = {"dataset": through_dataset, "memmap": plainly}
    for work in ways.values():
        work()
    found = rounds(list(ways), lambda way: timed(ways[way]), max(count, 5))
    rows = [["numpy memmap", ratio(found["dataset"], found["memmap"], "samples_per_second")]]
    print(table(["random samples of 1,024, samples/s against", "ratio"], rows), "\n")


def start(folder: Path) -> None:
    """Measure the time to open 10^12 tokens and get the first batch. The file of 2 TB is sparse."""
    from crosstrain.config.batch import BatchPlan
    from crosstrain.config.registry import registry
    from crosstrain.data.loader import training_steps

    documents, size = 500, 2_000_000_000
    with TokenWriter(folder / "huge", np.uint16) as writer:
        writer._sizes, writer.num_documents = [np.full(documents, size, "<i4")], documents  # not copied: 2 TB of zeros
        writer._bin.truncate(2 * documents * size)
    cls = registry.get("dataset", "text")
    before = sorted(path.name for path in folder.rglob("*"))
    started = time.perf_counter()
    dataset = cls(cls.Options(path=str(folder / "huge"), seq_length=1024), "train")
    next(training_steps(dataset, BatchPlan(8, 8, 1, 1), seed=1, start=0, dp_rank=0))
    seconds = time.perf_counter() - started
    assert TokenFile(folder / "huge").num_tokens == 10**12
    assert sorted(path.name for path in folder.rglob("*")) == before
    print(f"10^12 tokens: {seconds:.3f} s to the first batch of 8, no file made")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small corpus and two rounds")
    parser.add_argument("--parts", nargs="+", default=["near", "read", "start"])
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    count = arguments.rounds or (2 if arguments.quick else 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "near" in arguments.parts:
            print(f"{make_corpus(folder, 1 if arguments.quick else 5) / 1e6:.0f} MB of text", file=sys.stderr)
        for part, work in {"near": near, "read": read}.items():
            if part in arguments.parts:
                work(folder, count)
        if "start" in arguments.parts:
            start(folder)


if __name__ == "__main__":
    main()
