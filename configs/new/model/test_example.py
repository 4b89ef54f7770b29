"""The model learns, and its loss is the cross-entropy of its logits."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from crosstrain import registry

HERE = Path(__file__).parent
PROJECT = f"""
model: {{arch: example, vocab_size: 300, hidden_size: 32}}
datasets:
  text: {{name: text, path: data, seq_length: 32, prepare: {{input: text.txt, separator: '. ', train_tokenizer: 300}}}}
run: {{plugins: ["{HERE / "example.py"}"], output_dir: out, max_iters: 20, global_batch_size: 8, init_lr: 1e-2,
       log_interval: 1, device: cpu}}
"""


def test_the_loss_falls(tmp_path: Path) -> None:
    (tmp_path / "project.yaml").write_text(PROJECT)
    (tmp_path / "text.txt").write_text("a word and another word, again and again. " * 500)
    subprocess.run(
        [sys.executable, "-m", "crosstrain", "train", "--cfg-path", "project.yaml"], cwd=tmp_path, check=True
    )
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]


def test_the_loss_is_that_of_the_logits() -> None:
    registry.add_folder(HERE / "example.py")
    cls = registry.get("model", "example")
    model = cls(cls.Options(vocab_size=11))
    ids, label = torch.arange(8).reshape(1, 8), torch.full((1, 8), -100)
    label[0, -1] = 3
    expected = torch.nn.functional.cross_entropy(model(ids), label[:, -1])
    assert torch.allclose(model(ids, label), expected, rtol=1e-4)  # fp32 sums in a different order
