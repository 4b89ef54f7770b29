"""Show how fast a training step on a CPU could be: the times of parts that it needs, relative to nanoGPT's step.

    python benchmarks/step_floor.py --nanogpt FOLDER [--precision bf16] [--rounds 5]

Each part is computed by the fastest known kernel, on data of the sizes of `benchmarks/step.py`, without anything around
it: no autograd graph, no residual additions, no copies, no new memory. The parts alternate with steps of nanoGPT.
nanoGPT's step time divided by the sum of the parts is a bound for every implementation that uses these kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

import nanogpt
import torch
from common import Sizes, table
from torch import Tensor
from torch.nn import functional

from crosstrain.engine.precision import choose_products

SIZES = Sizes()
BATCH, VOCABULARY = 8, 50304
ROWS, WIDTH, HEADS = BATCH * SIZES.length, SIZES.hidden, SIZES.heads
LAYERS = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]  # inputs and outputs
CHUNKS = (256, 512, 1024, 2048)  # rows for which the logits are computed at a time

Part = Callable[[], None]


def product(inputs: int, outputs: int, rows: int, dtype: torch.dtype) -> Part:
    """Compute a layer's output, and the gradients of its input and of its weight."""
    x, weight, gradient = (
        torch.randn(*shape, dtype=dtype) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    found = [torch.empty_like(tensor) for tensor in (gradient, x, weight)]

    def run() -> None:
        torch.mm(x, weight.T, out=found[0])
        torch.mm(gradient, weight, out=found[1])
        torch.mm(gradient.T, x, out=found[2])

    return run


def head(rows: int, dtype: torch.dtype) -> Part:
    """Compute the products of the output layer, some rows at a time."""
    part = product(WIDTH, VOCABULARY, rows, dtype)

    def run() -> None:
        for _ in range(ROWS // rows):
            part()

    return run


def softmax(rows: int, dtype: torch.dtype) -> Part:
    """Read and write the logits once."""
    logits = torch.randn(rows, VOCABULARY, dtype=dtype)

    def run() -> None:
        for _ in range(ROWS // rows):
            logits.softmax(-1)

    return run


def attention(compute: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> Part:
    shape = BATCH, HEADS, SIZES.length, WIDTH // HEADS
    q, k, v = (torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(*shape, dtype=dtype)

    def run() -> None:
        torch.autograd.grad(compute(q, k, v), (q, k, v), gradient)

    return run


def elementwise(function: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> Part:
    x = torch.randn(ROWS, width, dtype=dtype, requires_grad=True)
    gradient = torch.randn(ROWS, width, dtype=dtype)
    return lambda: torch.autograd.grad(function(x), x, gradient) and None


def update(dtype: torch.dtype) -> Part:
    """Convert the weights and their gradients once, if need be, and take a step of AdamW."""
    count = SIZES.layers * sum(a * b for a, b in LAYERS) + WIDTH * (VOCABULARY + SIZES.length)
    weights = torch.randn(count)
    weights.grad = torch.randn(count)
    narrow = weights.to(dtype)
    optimizer = torch.optim.AdamW([weights], fused=True)

    def run() -> None:
        if dtype != weights.dtype:
            narrow.copy_(weights)
            weights.grad.copy_(narrow)
        optimizer.step()

    return run


def parts(dtype: torch.dtype) -> dict[str, list[tuple[int, list[Part]]]]:
    """Return name -> (how often a step needs it, implementations, of which the fastest counts)."""
    from crosstrain_plugins.builtin.models.hugging_face import cpu_attention

    layers = [(SIZES.layers, [product(a, b, ROWS, dtype)]) for a, b in LAYERS]
    norm = elementwise(lambda x: functional.layer_norm(x, (WIDTH,)), WIDTH, dtype)
    kernels = [
        lambda *x: functional.scaled_dot_product_attention(*x, is_causal=True),
        lambda *x: cpu_attention.attention(*x, (WIDTH // HEADS) ** -0.5, 0.0),
    ]
    return {
        "products of matrices": [*layers, (1, [head(rows, dtype) for rows in CHUNKS])],
        "attention": [(SIZES.layers, [attention(kernel, dtype) for kernel in kernels])],
        "softmax of the loss": [(1, [softmax(rows, dtype) for rows in CHUNKS])],
        "norms and activations": [
            (2 * SIZES.layers + 1, [norm]),
            (SIZES.layers, [elementwise(functional.gelu, 4 * WIDTH, dtype)]),
        ],
        "update": [(1, [update(dtype)])],
    }


def seconds(part: Part, times: int = 3) -> float:
    """Return the shortest of some times."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        part()
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    dtype = torch.float32 if given.precision == "fp32" else torch.bfloat16
    needed, found, steps = parts(dtype), dict[str, list[float]](), list[float]()
    stamps = [time.perf_counter()]

    def after_step() -> None:
        """Measure the parts between two steps."""
        steps.append(time.perf_counter() - stamps[-1])
        choose_products()  # nanoGPT's steps use torch's default
        for name, pieces in needed.items():
            taken = sum(count * min(map(seconds, choices)) for count, choices in pieces)
            found.setdefault(name, []).append(taken)
        torch.set_float32_matmul_precision("highest")
        stamps.append(time.perf_counter())

    tokens = torch.randint(VOCABULARY, (BATCH, SIZES.length + 1))
    sizes = {
        "n_layer": SIZES.layers,
        "n_head": HEADS,
        "n_embd": WIDTH,
        "block_size": SIZES.length,
        "vocab_size": VOCABULARY,
    }
    batches = repeat(tokens, given.rounds + 2)
    nanogpt.train(given.nanogpt, sizes, batches, "cpu", given.precision, False, after_step)
    step = statistics.median(steps[2:])
    shares = {name: statistics.median(times[2:]) / step for name, times in found.items()}
    rows = [[name, f"{share:.2f}"] for name, share in shares.items()]
    total = sum(shares.values())
    print(
        table(
            [f"{given.precision}: part", "of nanoGPT's step"],
            [*rows, ["sum", f"{total:.2f}"], ["bound", f"{1 / total:.2f}"]],
        )
    )


if __name__ == "__main__":
    main()
