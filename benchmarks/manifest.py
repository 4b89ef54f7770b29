"""Measure the manifest of a checkpoint of many ranks: its size, and a rank's time and memory to plan a load.

    python benchmarks/manifest.py [--ranks 16384]

The model has 405 billion parameters (126 layers of width 16,384); its tensors are not written. The manifest describes a
checkpoint of tensor parallelism 8 x pipeline parallelism 16 x data parallelism. Each data-parallel rank holds an equal
range of its stage's flattened optimizer state. The same number of fsdp ranks loads it. To plan a load, a rank reads and
checks the manifest, and finds the chunks of files with its own boxes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, table

LAYERS, WIDTH, INNER, KEYS, VOCABULARY = 126, 16384, 53248, 1024, 128256
TENSOR, PIPELINE = 8, 16
MIB = 1 << 20


def layer() -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Return tensor name -> (shape, dimension that tensor parallelism shards; None: replicated), for a layer."""
    return {
        "self_attn.q_proj.weight": ((WIDTH, WIDTH), 0),
        "self_attn.k_proj.weight": ((KEYS, WIDTH), 0),
        "self_attn.v_proj.weight": ((KEYS, WIDTH), 0),
        "self_attn.o_proj.weight": ((WIDTH, WIDTH), 1),
        "mlp.gate_proj.weight": ((INNER, WIDTH), 0),
        "mlp.up_proj.weight": ((INNER, WIDTH), 0),
        "mlp.down_proj.weight": ((WIDTH, INNER), 1),
        "input_layernorm.weight": ((WIDTH,), None),
        "post_attention_layernorm.weight": ((WIDTH,), None),
    }


def tensors() -> dict[str, tuple[tuple[int, ...], int | None]]:
    ends = {
        "model.embed_tokens.weight": ((VOCABULARY, WIDTH), 0), "model.norm.weight": ((WIDTH,), None),
        "lm_head.weight": ((VOCABULARY, WIDTH), 0),
    }  # fmt: skip
    return ends | {f"model.layers.{n}.{name}": t for n in range(LAYERS) for name, t in layer().items()}


def write(folder: Path, ranks: int) -> int:
    """Write the manifest, and return its number of boxes."""
    from crosstrain.checkpoint.boxes import Box, _range_boxes
    from crosstrain.checkpoint.checkpointer import Holding, file_names
    from crosstrain.checkpoint.manifest import CHUNK, DIGITS, MANIFEST, manifest_text

    copies = ranks // (TENSOR * PIPELINE)

    def stage(name: str) -> int:
        return int(name.split(".")[2]) * PIPELINE // LAYERS if ".layers." in name else PIPELINE * (name[0] == "l") - 1

    def held() -> Iterator[tuple[Holding, int]]:
        for kind in ("exp_avg", "exp_avg_sq", "param"):
            for p in range(PIPELINE):
                mine = {name: t for name, t in tensors().items() if stage(name) % PIPELINE == p}
                for t in range(TENSOR):
                    shapes = {}
                    for name, (shape, cut) in mine.items():
                        if cut is not None or t == 0:
                            here = tuple(n // TENSOR if d == cut else n for d, n in enumerate(shape))
                            shapes[name] = shape, here, tuple(t * n if d == cut else 0 for d, n in enumerate(here))
                    sizes = {name: here[0] * (here[1] if len(here) > 1 else 1) for name, (_, here, _) in shapes.items()}
                    share, at = -(-sum(sizes.values()) // copies), 0
                    for name, (shape, here, offset) in shapes.items():
                        first = at
                        while first < at + sizes[name]:
                            rank, last = first // share, min(at + sizes[name], (first // share + 1) * share)
                            for box, _ in _range_boxes(here, first - at, last - at):
                                moved = Box(tuple(map(sum, zip(box.offset, offset, strict=True))), box.shape)
                                yield Holding(kind, name, shape, "F32", moved), (rank * TENSOR + t) * PIPELINE + p
                            first = last
                        at += sizes[name]

    writers = dict(held())
    sizes: dict[str, int] = {}
    listed: dict[str, dict] = {}
    for h, file in file_names(writers, complete=True).items():
        sizes[file] = sizes.get(file, 0) + 4 * h.box.numel
        entry = listed.setdefault(h.kind, {}).setdefault(h.name, {"shape": h.shape, "dtype": "F32", "boxes": []})
        entry["boxes"].append([file, h.key, h.box.offset, h.box.shape])
    files = {f: {"bytes": n + 4096, "xxh3": "0" * DIGITS * -(-(n + 4096) // CHUNK)} for f, n in sizes.items()}
    files["state.json"] = {"bytes": 2, "xxh3": "0" * DIGITS}
    (folder / MANIFEST).write_bytes(manifest_text({"files": files, "tensors": listed}))
    return len(writers)


def memory_peak() -> int:
    """Return the peak resident memory of this process, in KiB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def plan(folder: Path, ranks: int, rank: int) -> dict[str, float]:
    """Return the time of planning on one fsdp rank, and its memory on top of the imports."""
    import torch

    from crosstrain.checkpoint.boxes import Box, Piece, Shard
    from crosstrain.checkpoint.files import Reader
    from crosstrain.checkpoint.manifest import CHUNK

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, because it may be the parent's
    before = memory_peak()
    started = time.perf_counter()
    reader = Reader.open(folder)
    shards = []
    for kind in ("exp_avg", "exp_avg_sq", "param"):
        for name, (shape, _) in tensors().items():
            rows = -(-shape[0] // ranks)
            first, last = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
            if first < last:
                box = Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
                shards.append(Shard(kind, name, shape, [Piece(box, torch.empty(box.shape, device="meta"))]))
    chunks = reader.chunks(shards)
    seconds = time.perf_counter() - started
    after = memory_peak()
    own = sum(piece.box.numel * 4 for shard in shards for piece in shard.pieces)
    assert 0 < own <= len(chunks) * CHUNK
    return {"seconds": seconds, "mib": (after - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "platform"))
    from crosstrain.utils import storage

    if arguments.folder:
        print(json.dumps(plan(arguments.folder, arguments.ranks, 5)))
        return
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        folder = storage.local("memory://bucket")  # the local copy of a bucket's manifest
        folder.mkdir(parents=True)
        boxes = write(folder, arguments.ranks)
        size = (folder / "manifest.json").stat().st_size / MIB
        command = [sys.executable, __file__, "--ranks", str(arguments.ranks), "--folder", str(folder)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    row = [f"{arguments.ranks:,}", f"{boxes:,}", f"{size:.0f} MiB"]
    row += [f"{found['seconds']:.1f} s", f"{found['mib']:.0f} MiB"]
    print(table(["ranks", "boxes", "manifest", "planning a load, per rank", "memory for it"], [row]))


if __name__ == "__main__":
    main()
