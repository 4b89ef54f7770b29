"""Measure training steps on GPUs: tokens/s, MFU, peak memory and bytes sent, with `plan`'s and published values.

    python benchmarks/gpu.py                                  # on all GPUs of this machine
    python benchmarks/gpu.py --nanogpt ~/nanoGPT              # also nanoGPT's own model, compiled, from its checkout
    python benchmarks/gpu.py --bitwise                        # are the bits the same under every runner?
    python benchmarks/gpu.py --device cpu --scale tiny        # the same in a minute without a GPU

GPT-2 124M runs on one GPU, and Llama-3.1-8B on all GPUs under fsdp, as in torchtitan's table. Weights and tokens are
random. Speed is computed from the median step after the first five. MFU is the plan's FLOPs per second, without
recomputation, as a fraction of the device's peak. Bytes are counted on rank 0 in its second step, assuming ring
algorithms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, Result, child, table
from nanogpt import train

# Part of the device's name -> FLOP/s of dense bf16 matrix products, from the vendors' data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}
STEPS, WARM = 15, 5


@dataclass(frozen=True)
class Row:
    """A row of the table: a model, the options of its run, and published values."""

    name: str
    model: str
    options: tuple[str, ...]
    length: int
    micro_batch: int
    ranks: int | None = 1  # None: all GPUs
    published: str = "-"
    nanogpt: dict[str, int] = field(default_factory=dict)  # sizes of the same model in nanoGPT


GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
         "tie_word_embeddings": False}  # fmt: skip
SMALL_LLAMA = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50257,
    "max_position_embeddings": 64,
}


def rows(scale: str) -> list[Row]:
    """Return the rows of the table. Scale `tiny`: the same kinds of runs with tiny models."""
    tiny = scale == "tiny"
    sizes, length, micro = (TINY, 64, 2) if tiny else (GPT2, 1024, 16)
    gpt2 = json.dumps({"arch": "gpt2", "n_positions": length, "vocab_size": 50257, "dropout": 0.0} | sizes)
    llama = json.dumps({"arch": "causal_lm", "config": SMALL_LLAMA if tiny else LLAMA})
    compiled = ("run.compile=blocks",)
    sharded = ("run.runner=fsdp", "run.gradient_checkpointing=selective")
    long = 64 if tiny else 8192
    return [
        Row("GPT-2 124M", gpt2, (), length, micro),
        Row("GPT-2 124M, compiled", gpt2, compiled, length, micro, nanogpt=sizes),
        Row("Llama-3.1-8B, fsdp", llama, sharded, long, 2, None, "torchtitan, 8 H100: 5,762"),
        Row("Llama-3.1-8B, fsdp, compiled", llama, sharded + compiled, long, 2, None, "torchtitan, 8 H100: 6,667"),
    ]


def project_of(folder: Path, row: Row, ranks: int, device: str) -> Path:
    """Write a row's random tokens and project file, and return the path of the project file."""
    import numpy as np
    from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenWriter, best_dtype

    tokens = np.random.default_rng(0).integers(0, 50257, STEPS * row.micro_batch * ranks * (row.length + 1))
    with TokenWriter(folder / "tokens", best_dtype(50257)) as writer:
        writer.add([tokens.tolist()])
    data = {"name": "text", "path": f"{folder}/tokens", "seq_length": row.length, "split": [1, 0, 0]}
    run = {
        "output_dir": f"{folder}/run", "max_iters": STEPS, "micro_batch_size": row.micro_batch, "amp": "bf16",
        "device": device, "trackers": [],
    }  # fmt: skip
    project = folder / "project.yaml"
    project.write_text(json.dumps({"model": json.loads(row.model), "datasets": {"random": data}, "run": run}))
    return project


def worker(plain: dict[str, Any], result: Path) -> int:
    """Train on this rank without saves. Rank 0 writes the median step time, peak memory, and bytes sent in step 2."""
    from crosstrain_plugins.builtin.commands.plan.calls import sent_by
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from crosstrain.config.load import Config
    from crosstrain.distributed.launch.signals import StopRequest
    from crosstrain.engine.build import make_runner
    from crosstrain.monitor.hardware import memory_mb
    from crosstrain.training.worker import build_trainer

    class Sent(TorchDispatchMode):
        """Adds up the bytes of collective calls."""

        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if DTensor in types:
                return NotImplemented  # torch then dispatches the DTensor's operations on plain tensors here
            out = func(*args, **(kwargs or {}))
            self.total += sent_by(func, args, out)
            return out

    config = Config.from_plain(plain)
    runner = make_runner(config)
    runner.setup()
    before = memory_mb(runner.device).get("memory_allocated_mb", 0.0)
    trainer = build_trainer(config, runner, StopRequest(True), quiet=True, hooks_before={}, hooks_after={})
    batches, stamps, sent = trainer.batches(), [], Sent()
    for step in range(STEPS):
        with sent if step == 1 else nullcontext():
            metrics = trainer.train_step(batches)  # ends with the loss on the host
        stamps.append(time.perf_counter())
    assert metrics is not None
    peak = max(runner.world.all_gather(memory_mb(runner.device)["memory_peak_mb"] - before))
    if runner.world.rank == 0:
        result.write_text(json.dumps({"seconds": seconds_of(stamps), "peak_mb": peak, "sent": sent.total}))
    runner.close()
    return 0


def seconds_of(stamps: list[float]) -> float:
    """Return the seconds of the median step, without the first steps, because libraries load and compile in them."""
    return statistics.median(b - a for a, b in zip(stamps[WARM:], stamps[WARM + 1 :], strict=False))


def measure(row: Row, ranks: int, device: str, peak: float | None) -> list[str]:
    """Train a row, and return the measured values with the values of the plan."""
    from crosstrain_plugins.builtin.commands.plan.estimate import Project

    from crosstrain.config.load import load_config
    from crosstrain.distributed.launch.launch import Launch
    from crosstrain.distributed.launch.launcher import launch
    from crosstrain.training.preflight import preflight

    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / "result.json"
        config = load_config(project_of(Path(temporary), row, ranks, device), row.options)
        if launch(worker, (config.plain, result), Launch(ranks, True, False, True)):
            raise SystemExit(f"{row.name}: stopped")
        found = json.loads(result.read_text())
        ready = preflight(config, ranks)
        project = Project(config, ready.model, ready.sample)
        plan = project.estimate(config, ranks)
    tokens = plan.batch.global_batch * row.length
    mfu = project.flops(plan.batch, "none") / found["seconds"] / ranks / peak if peak else None
    return [
        row.name,
        f"{ranks}",
        f"{tokens / found['seconds'] / ranks:,.0f}",
        f"{mfu:.1%}" if mfu else "-",
        f"{found['peak_mb']:,.0f}",
        f"{plan.memory.total / 2**20:,.0f}",
        f"{found['sent'] / 2**20:,.1f}",
        f"{plan.sent / 2**20:,.1f}",
        row.published,
    ]


def bitwise(row: Row, ranks: int, device: str) -> list[list[str]]:
    """Train a row under runners and numbers of ranks; return the digests, and step times relative to the engine's own.

    The batch has one micro batch for each of `ranks` ranks.
    """
    from crosstrain.checkpoint.digests import recorded
    from crosstrain.checkpoint.folders import find_checkpoint

    layouts = [("ddp", count) for count in sorted({1, max(1, ranks // 2), ranks})]
    layouts += [(runner, ranks) for runner in ("fsdp", "zero2", "zero3") if ranks > 1]
    out = []
    with tempfile.TemporaryDirectory() as temporary:
        project = project_of(Path(temporary), row, ranks, device)
        for runner, count in layouts:
            seconds = {}
            for wanted in ("on", "off"):
                folder = Path(temporary) / f"{runner}{count}_{wanted}"
                options = (f"run.output_dir={folder}", f"run.bitwise={wanted}", f"run.runner={runner}")
                batch = (
                    f"run.global_batch_size={row.micro_batch * ranks}",
                    "run.trackers=[jsonl]",
                    "run.log_interval=1",
                )
                command = [sys.executable, str(ROOT / "train.py"), "--cfg-path", str(project), "--no-fit-check"]
                subprocess.run(
                    [*command, "--nproc-per-node", str(count), "--options", *row.options, *options, *batch],
                    check=True,
                    stdout=sys.stderr,
                )
                steps = [json.loads(line)["step_ms"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
                seconds[wanted] = statistics.median(steps[WARM:])
            found = recorded(find_checkpoint(Path(temporary) / f"{runner}{count}_on"))
            ratio = seconds["on"] / seconds["off"]
            out.append([row.name, f"{runner}@{count}", found["weights"][:16], found["moments"][:16], f"{ratio:.2f}"])
    return out


def nanogpt(checkout: Path, row: Row, device: str, compiled: bool) -> Result:
    """Train nanoGPT's model as `row`."""
    import torch

    stamps: list[float] = []
    shape = (row.micro_batch, row.length + 1)
    train(
        checkout,
        row.nanogpt | {"block_size": row.length},
        (torch.randint(50257, shape, device=device) for _ in range(STEPS)),
        device,
        "bf16",
        compiled,
        lambda: stamps.append(time.perf_counter()),
    )
    memory = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0
    return {"tokens_per_second": row.micro_batch * row.length / seconds_of(stamps), "memory_mb": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--scale", default="full", choices=["full", "tiny"])
    parser.add_argument("--peak", type=float, help="a device's FLOP/s in bf16, where its name does not tell")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--bitwise", action="store_true", help="compare the bits of runners and numbers of ranks")
    parser.add_argument("--rows", nargs="+", type=int, help="numbers of rows, from 0 (default: all)")
    parser.add_argument("--theirs", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "platform"))
    chosen = rows(arguments.scale)
    if arguments.theirs is not None:
        full = arguments.scale == "full"
        print(json.dumps(nanogpt(arguments.nanogpt, chosen[arguments.theirs], arguments.device, full)))
        return

    import torch

    devices, peak = 2, arguments.peak  # on a CPU, two processes
    if arguments.device == "cuda":
        devices, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        peak = peak or next((flops for part, flops in PEAKS.items() if part in name), None)
        print(f"{devices} x {name}, torch {torch.__version__}", file=sys.stderr)
    out: list[list[Any]] = []
    if arguments.bitwise:
        for number in arguments.rows or [0]:
            out += bitwise(chosen[number], devices, arguments.device)
        print(table(["model", "layout", "weights", "moments", "step time / without run.bitwise"], out))
        return
    for number in arguments.rows or range(len(chosen)):
        row = chosen[number]
        out.append(measure(row, row.ranks or devices, arguments.device, peak))
        print(out[-1], file=sys.stderr, flush=True)
        if arguments.nanogpt and row.nanogpt:
            flags = ("--nanogpt", str(arguments.nanogpt), "--scale", arguments.scale, "--device", arguments.device)
            theirs = child(__file__, "--theirs", str(number), *flags)
            out.append(
                [
                    f"nanoGPT, as {row.name}",
                    "1",
                    f"{theirs['tokens_per_second']:,.0f}",
                    "-",
                    f"{theirs['memory_mb']:,.0f}",
                    "-",
                    "-",
                    "-",
                    "-",
                ]
            )
    header = ["model", "GPUs", "tokens/s of each", "MFU", "peak MiB", "planned MiB", "MiB sent in a step",
              "planned MiB sent", "published tokens/s of each"]  # fmt: skip
    print(table(header, out))


if __name__ == "__main__":
    main()
