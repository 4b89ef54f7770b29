"""Check the maximal update parametrization: activations and the best learning rate over widths.

    python benchmarks/mup.py [--part coordinates|rates]

`coordinates`: root mean square of hidden states and logits of GPT-2 before training and after 5 steps, at widths of 64
to 512. With the right parametrization they depend on the width only a little. `rates`: final loss on quickstart's text
for rates on a grid of factors of 2, at widths of 64 to 256, with and without `mup_base_width`; a vocabulary of 512.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, table

sys.path.insert(0, str(ROOT / "tests"))

import torch

WIDTHS, BASE = (64, 128, 256, 512), 64
RATES = tuple(2.0**-n for n in range(13, 6, -1))
COMMON = (
    "model.dropout=0", "model.n_layer=2", "model.n_positions=64", "datasets.stdlib.seq_length=64", "run.amp=fp32",
    "run.global_batch_size=16", "run.eval_interval=null", "run.sample_prompts=[]", "run.lr_sched=constant",
    "run.weight_decay=0", "run.device=cpu", "run.warmup_fraction=0.1",
)  # fmt: skip


def trainer(folder: Path, width: int, scaled: bool, rate: float, steps: int) -> Any:
    from crosstrain.config.load import load_config
    from crosstrain.data.splits import prepare_data
    from fixtures_ranks import make_trainer

    options = [
        *COMMON,
        f"model.n_embd={width}",
        f"model.n_head={width // 32}",
        f"run.output_dir={folder}/{width}-{scaled}-{rate}-{steps}",
    ]
    options += [f"run.init_lr={rate}", f"run.min_lr={rate}", f"run.max_iters={steps}"]
    options += [f"model.mup_base_width={BASE}"] * scaled
    options += [f"datasets.stdlib.path={folder}/text", "datasets.stdlib.prepare.train_tokenizer=512"]
    project = str(ROOT / "projects/quickstart.yaml")
    prepare_data(load_config(project, options))  # once: the first trainer tokenizes the text
    return make_trainer(project, tuple(options), bare=True)


@torch.no_grad()
def sizes(model: Any, ids: torch.Tensor) -> list[float]:
    """Root mean square of the first block's output, of the last block's, and of the logits."""
    found = model.lm(ids, output_hidden_states=True)
    values = (found.hidden_states[1], found.hidden_states[-2], found.logits[..., : model.vocab_size])
    return [value.square().mean().sqrt().item() for value in values]


def coordinates(folder: Path) -> None:
    rows = []
    for scaled in (False, True):
        for width in WIDTHS:
            made = trainer(folder, width, scaled, 2.0**-7, 5)
            stream = made.batches()
            ids = torch.randint(0, made.runner.model.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
            model = made.runner.model
            before = sizes(model.eval(), ids)
            for _ in range(5):
                made.train_step(stream)
            after = sizes(model.eval(), ids)
            pairs = [f"{a:.2f} -> {b:.2f}" for a, b in zip(before, after, strict=True)]
            rows.append(["mup_base_width" if scaled else "standard", width, *pairs])
    print(table(["parametrization", "width", "first block", "last hidden state", "logits"], rows))


def rates(folder: Path, steps: int) -> None:
    rows = []
    for scaled in (False, True):
        for width in WIDTHS[:3]:
            losses = []
            for rate in RATES:
                made = trainer(folder, width, scaled, rate, steps)
                stream, last = made.batches(), list[float]()
                for _ in range(steps):
                    last.append(made.train_step(stream).loss or float("inf"))
                losses.append(sum(last[-20:]) / 20)
            best = RATES[losses.index(min(losses))]
            rows.append(
                ["mup_base_width" if scaled else "standard", width, *(f"{loss:.3f}" for loss in losses), f"{best:.5f}"]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    print(table(["parametrization", "width", *(f"{rate:.5f}" for rate in RATES), "best rate"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("coordinates", "rates"))
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.part != "rates":
            coordinates(Path(folder))
        if asked.part != "coordinates":
            rates(Path(folder), asked.steps)


if __name__ == "__main__":
    main()
