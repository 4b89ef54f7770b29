"""Shards of small images for a test, and how a project opens them."""

from __future__ import annotations

import http.server
import importlib
import io
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.data.dataset import Split
from crosstrain.data.splits import open_split, prepare_data
from fixtures_vision import write_project


def jpeg(seed: int, size: tuple[int, int] = (18, 30)) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def write_shard(path: Path, samples: list[dict[str, bytes]], first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for i, sample in enumerate(samples, first):
            for extension, data in sample.items():
                info = tarfile.TarInfo(f"{i:06d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def module_of(dataset: str, other: str | None = None) -> Any:
    """The module of a dataset's plugin, or another one beside it."""
    name = registry.get("dataset", dataset).__module__
    return importlib.import_module(name if other is None else f"{name.rpartition('.')[0]}.{other}")


def opened(folder: Path, dataset: dict[str, Any], *given: str, split: Split = "train") -> Any:
    config = load_config(write_project(folder / "project.yaml", dataset), list(given))
    prepare_data(config)
    return open_split(config, split)


def captions(words: Path, **more: Any) -> dict[str, Any]:
    processor = {"name": "captions"}
    text = {"text_processor": {"train": processor, "eval": processor}}
    return {"name": "image_text", "tokenizer": str(words), **text, **more}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address under which a folder's files are served meanwhile."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()
