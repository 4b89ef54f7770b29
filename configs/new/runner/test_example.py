"""The runner trains, evaluates, saves, resumes and exports like plain torch, on any number of workers."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = f"""
model: {{arch: gpt2, n_embd: 32, n_layer: 2, n_head: 2, n_positions: 32, vocab_size: 300, dropout: 0.1}}
datasets:
  text: {{name: text, path: data, seq_length: 32, prepare: {{input: text.txt, separator: '. ', train_tokenizer: 300}}}}
run:
  plugins: ["{HERE / "example.py"}"]
  runner: example
  output_dir: out
  max_iters: 4
  global_batch_size: 8
  micro_batch_size: 2
  device: cpu
"""


def test_it_is_verified(tmp_path: Path) -> None:
    (tmp_path / "project.yaml").write_text(PROJECT)
    (tmp_path / "text.txt").write_text("a word and another word, again and again. " * 500)
    verify = ["verify", "--cfg-path", "project.yaml", "--runners", "example@2", "--output", "verified.md"]
    subprocess.run([sys.executable, "-m", "crosstrain", *verify], cwd=tmp_path, check=True)
