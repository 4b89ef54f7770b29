"""Crosstrain finds the components of the installed package, and trains with them."""

import json
import subprocess
import sys
from pathlib import Path

from crosstrain import registry

PROJECT = """
model: {arch: gpt2, n_embd: 32, n_layer: 1, n_head: 2, n_positions: 32, vocab_size: 300}
datasets:
  text: {name: text, path: data, seq_length: 32, prepare: {input: text.txt, separator: '. ', train_tokenizer: 300}}
run: {optimizer: example, output_dir: out, max_iters: 20, global_batch_size: 8, init_lr: 3e-3, log_interval: 1,
      device: cpu}
"""


def test_crosstrain_finds_it() -> None:
    assert "example" in registry.names("optimizer")


def test_the_loss_falls(tmp_path: Path) -> None:
    (tmp_path / "project.yaml").write_text(PROJECT)
    (tmp_path / "text.txt").write_text("a word and another word, again and again. " * 500)
    subprocess.run(
        [sys.executable, "-m", "crosstrain", "train", "--cfg-path", "project.yaml"], cwd=tmp_path, check=True
    )
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
