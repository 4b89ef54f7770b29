"""The recipes from raw text to a model that writes: a list of URLs, and a dump of Wikipedia."""

from __future__ import annotations

import bz2
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from crosstrain_plugins.builtin.commands.prepare.train_bpe import train_bpe
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenFile
from crosstrain_plugins.builtin.datasets.prepared import Summary

from conftest import ENVIRONMENT, ROOT
from crosstrain.data.tokenizer import load_tokenizer
from fixtures_web import PAGE, Server, server

__all__ = ["server"]  # a fixture

WHO = ["The fisherman", "An old captain", "My neighbour", "The young teacher", "A travelling doctor", "The mayor"]
DID = ["carried", "sold", "forgot", "painted", "repaired", "borrowed", "remembered", "photographed"]
WHAT = ["a wooden boat", "the heavy lantern", "some letters", "an empty basket", "the broken clock", "a red bicycle"]
WHERE = ["near the harbour", "behind the church", "in the winter garden", "on the long bridge", "at the station"]


def english(seed: int, sentences: int = 45) -> str:
    rng = random.Random(seed)
    told = (
        f"{rng.choice(WHO)} {rng.choice(DID)} {rng.choice(WHAT)} {rng.choice(WHERE)} in {rng.randint(1800, 1999)}."
        for _ in range(sentences)
    )
    return " ".join(told)


def html(text: str) -> tuple[int, str, bytes]:
    body = "".join(f"<p>{text[k : k + 500]}</p>" for k in range(0, len(text), 500))
    page = f"<html><body><nav>Home | About</nav><article>{body}</article><footer>Imprint</footer></body></html>"
    return 200, "text/html; charset=utf-8", page.encode()


def run(*command: str, cwd: Path) -> str:
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_and_write(folder: Path, data: str) -> None:
    """A small GPT-2 on what was prepared, for some steps, and a few words from it."""
    vocabulary = Summary.read(folder / data).vocab_size
    project = {
        "model": {
            "arch": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": vocabulary,
        },
        "datasets": {"mine": {"name": "text", "path": data, "seq_length": 64, "split": [8, 1, 1]}},
        "run": {
            "output_dir": "out", "max_iters": 40, "global_batch_size": 8, "micro_batch_size": 8, "init_lr": 1e-2,
            "log_interval": 1, "device": "cpu",
        },
    }  # fmt: skip
    (folder / "project.yaml").write_text(yaml.safe_dump(project))
    run(str(ROOT / "train.py"), "--cfg-path", "project.yaml", cwd=folder)
    losses = [json.loads(line)["loss"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.8 * losses[0]
    written = run(
        str(ROOT / "evaluate.py"),
        "--checkpoint",
        "out",
        "--generate",
        "The fisherman",
        "--max-new-tokens",
        "8",
        cwd=folder,
    )
    assert "The fisherman" in written


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    here = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(here)


@pytest.mark.slow
def test_from_a_list_of_urls_to_a_model(server: Server, folder: Path) -> None:
    for n in range(30):
        server.content[f"/{n}"] = html(english(n))
    copied = english(3).split()
    copied[40] = "elephant"
    server.content |= {
        "/short": html("Too short to be of any use. " * 4),
        "/again": html(english(3)),
        "/almost": html(" ".join(copied)),
        "/german": html(
            "Der alte Kapitän verkaufte das Boot am Hafen. Die Lehrerin malte eine Laterne im Garten. " * 9
        ),
        "/robots.txt": (200, "text/plain", b"User-agent: *\nDisallow: /admin"),
    }
    paths = [*(f"/{n}" for n in range(30)), "/short", "/again", "/almost", "/german", "/admin", "/x.jpg", "/gone", "/0"]
    (folder / "urls").mkdir()
    (folder / "urls" / "month.txt.bz2").write_bytes(bz2.compress("\n".join(map(server.url, paths)).encode()))
    train_bpe([english(n) for n in range(20)], 400).save(folder / "bpe")  # in the place of GPT-2's
    recipe: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "recipes" / "webtext.yaml").read_text())
    recipe["input"][0] |= {"delay": 0.0, "private_hosts": True}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"tokenizer": "bpe"}, sort_keys=False))
    run("-m", "crosstrain", "prepare", "--cfg-path", "recipe.yaml", cwd=folder)

    report = json.loads((folder / "data" / "webtext" / "report.json").read_text())
    read = report["inputs"]["urls/"]
    assert read["fetched"] == {
        "blocked ending": 1,
        "ok": 34,
        "HTTP status 404": 1,
        "robots.txt does not allow it": 1,
        "named more than once": 1,
    }
    assert read["dropped"]["language"]["documents"] == 1
    assert {kind: found["documents"] for kind, found in report["repeated"].items()} == {"exact": 1, "near": 1}
    dropped_for_length = report["tokenized"]["dropped"].get("document_length", {"documents": 0})["documents"]
    dropped_for_repetition = read["dropped"].get("repetition", {"documents": 0})["documents"]
    assert dropped_for_length + dropped_for_repetition == 1  # the short one, which says the same four times
    file, tokenizer = TokenFile(folder / "data" / "webtext" / "tokens"), load_tokenizer(folder / "bpe")
    assert file.num_documents == 30
    texts = {"".join(tokenizer.decode(file.document(d)[:-1].tolist()).split()) for d in range(30)}
    assert texts == {"".join(english(n).split()) for n in range(30)}
    train_and_write(folder, "data/webtext")


@pytest.mark.slow
def test_from_a_dump_of_wikipedia_to_a_model(server: Server, folder: Path) -> None:
    pages = "".join(PAGE.format(title=f"Story {n}", ns=0, text=f"'''Story {n}.''' " + english(n)) for n in range(40))
    dump = f"<mediawiki>\n{pages}{PAGE.format(title='Stub', ns=0, text='A stub.')}</mediawiki>\n"
    server.content["/enwiki-pages-articles.xml.bz2"] = 200, "application/x-bzip2", bz2.compress(dump.encode())
    server.cut = 4000
    run(
        "-m",
        "crosstrain",
        "prepare",
        "--cfg-path",
        str(ROOT / "configs" / "recipes" / "wikipedia.yaml"),
        "--train-tokenizer",
        "600",
        "--input",
        server.url("/enwiki-pages-articles.xml.bz2"),
        cwd=folder,
    )
    assert len(server.seen) == 2  # the transfer broke off once
    summary = Summary.read(folder / "data" / "wiki")
    assert (summary.documents, summary.dropped, summary.vocab_size) == (40, 1, 600)
    shown = run("-m", "crosstrain", "prepare", "inspect", "data/wiki", "--document", "7", cwd=folder)
    assert "Story 7\n\nStory 7. " in shown
    train_and_write(folder, "data/wiki")
