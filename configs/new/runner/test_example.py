"""The runner trains as plain torch does: the same losses, gradients and weights, on any number of workers."""

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
  global_batch_size: 4
  device: cpu
"""


def test_one_and_two_workers_train_as_plain_torch(tmp_path: Path) -> None:
    (tmp_path / "project.yaml").write_text(PROJECT)
    (tmp_path / "text.txt").write_text("a word and another word, again and again. " * 500)
    compare = ["compare", "--cfg-path", "project.yaml", "--runners", "ddp@1", "example@1", "example@2", "--steps", "2"]
    subprocess.run([sys.executable, "-m", "crosstrain", *compare], cwd=tmp_path, check=True)
