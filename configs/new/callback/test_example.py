"""The callback ends training, and a resumed run continues its count."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = f"""
model: {{arch: gpt2, n_embd: 32, n_layer: 1, n_head: 2, n_positions: 32, vocab_size: 300}}
datasets:
  text: {{name: text, path: data, seq_length: 32, prepare: {{input: text.txt, separator: '. ', train_tokenizer: 300}}}}
run: {{plugins: ["{HERE / "example.py"}"], callbacks: [{{name: example, loss: 100, steps: 5}}], output_dir: out,
       max_iters: 3, global_batch_size: 4, log_interval: 1, device: cpu}}
"""


def test_training_ends(tmp_path: Path) -> None:
    (tmp_path / "project.yaml").write_text(PROJECT)
    (tmp_path / "text.txt").write_text("a word and another word, again and again. " * 500)
    train = [sys.executable, "-m", "crosstrain", "train", "--cfg-path", "project.yaml"]
    subprocess.run(train, cwd=tmp_path, check=True)
    subprocess.run([*train, "--options", "run.max_iters=100"], cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["steps_below"] for row in rows] == [1, 2, 3, 4, 5]
