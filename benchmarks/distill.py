"""Compare the peak memory of a distillation loss in slices with that of dense logits.

    python benchmarks/distill.py [--tokens 4096] [--vocabulary 150000]

Each side runs in a process of its own: the forward KL of a student from a teacher, forward and backward, from the same
hidden states. The figures are the growth of the process's peak memory, and how far losses and gradients differ.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from functools import partial
from pathlib import Path

import torch
from common import child, table
from torch.nn.functional import kl_div, log_softmax

from crosstrain.config.registry import registry
from crosstrain.modeling.cross_entropy import Logits, token_cross_entropy

WIDTH, TEACHER = 64, 96


def measure(side: str, tokens: int, vocabulary: int, path: Path) -> float:
    """Return the growth of the peak memory in MB, and save the loss and the gradients."""
    rng = torch.Generator().manual_seed(0)
    hidden, theirs = (torch.randn(tokens, width, generator=rng) for width in (WIDTH, TEACHER))
    weight, teacher = (torch.randn(vocabulary, width, generator=rng) * 0.1 for width in (WIDTH, TEACHER))
    labels = torch.randint(vocabulary, (tokens,), generator=rng)
    hidden.requires_grad_()
    weight.requires_grad_()
    kind = registry.get("objective", "distill")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if side == "slices":
        made = kind(kind.Options("nobody"))
        made.head.weight, made.head.logits = teacher, Logits()
        given = partial(made.token_losses, batch={"labels": labels[None], "teacher": theirs[None]})
        loss = token_cross_entropy(hidden, weight, labels, token_losses=given)
    else:
        student, target = (log_softmax(h @ w.T, -1) for h, w in ((hidden, weight), (theirs, teacher)))
        loss = kl_div(student, target, reduction="sum", log_target=True)
    loss.backward()
    torch.save([loss.detach(), hidden.grad, weight.grad], path)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--side", choices=("slices", "dense"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        peak = measure(asked.side, asked.tokens, asked.vocabulary, asked.folder / asked.side)
        print(json.dumps({"peak_mb": peak}))
        return
    sizes = ["--tokens", str(asked.tokens), "--vocabulary", str(asked.vocabulary)]
    with tempfile.TemporaryDirectory() as folder:
        peaks = {
            side: child(__file__, "--side", side, "--folder", folder, *sizes)["peak_mb"] for side in ("slices", "dense")
        }
        ours, theirs = (torch.load(Path(folder) / side) for side in ("slices", "dense"))
    rows = [[side, f"{peak:.0f}"] for side, peak in peaks.items()]
    print(table(["side", "peak, MB"], [*rows, ["ratio", f"{peaks['slices'] / peaks['dense']:.3f}"]]))
    for name, a, b in zip(("loss", "hidden states", "weight"), ours, theirs, strict=True):
        print(f"{name}: largest difference {(a - b).abs().max() / b.abs().max():.1e} of the largest value")


if __name__ == "__main__":
    main()
