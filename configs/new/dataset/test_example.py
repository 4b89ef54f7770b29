"""The samples are arithmetic progressions, no two splits share a sample, and a model trains on them."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from crosstrain import registry

HERE = Path(__file__).parent
PROJECT = f"""
model: {{arch: gpt2, n_embd: 32, n_layer: 1, n_head: 2, n_positions: 32, vocab_size: 97}}
datasets: {{numbers: {{name: example}}}}
run: {{plugins: ["{HERE / "example.py"}"], output_dir: out, max_iters: 2, global_batch_size: 4, device: cpu}}
"""


def test_samples() -> None:
    registry.add_folder(HERE / "example.py")
    cls = registry.get("dataset", "example")
    seen = set()
    for split in ("train", "val", "test"):
        dataset = cls(cls.Options(length=4, modulus=7), split)
        for index in range(len(dataset)):
            sample = dataset.get(index, np.random.default_rng(0))
            ids, labels = sample["input_ids"], sample["labels"]
            assert (ids[1:] == labels[:-1]).all()
            assert len(set(np.diff(ids) % 7)) == 1
            seen.add(tuple(ids))
    assert len(seen) == 7 * 7


def test_a_model_trains_on_it(tmp_path: Path) -> None:
    (tmp_path / "project.yaml").write_text(PROJECT)
    subprocess.run(
        [sys.executable, "-m", "crosstrain", "train", "--cfg-path", "project.yaml"], cwd=tmp_path, check=True
    )
