"""Compare training steps with a bare PyTorch loop, the Hugging Face Trainer and nanoGPT: speed, memory, start-up.

    python benchmarks/step.py [--rounds 5] [--steps 6] [--precisions fp32 bf16] [--device cpu] [--against "bare loop"]
    python benchmarks/step.py --against nanogpt --nanogpt FOLDER    # a checkout of nanoGPT; without dropout
    python benchmarks/step.py --beside-busy-process ...             # with a process that keeps one core busy

All contestants have the same GPT-2, batch, precision, optimizer and data. Each runs in its own process, in turn. Tokens
per second are computed from the median step after the first two. Peak memory is the process's highest resident memory
minus the memory after the imports (on a GPU, torch's peak). Start-up is the time from the start of the process to the
end of the first step. Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, Result, Sizes, child, ratio, rounds, table, write_project

SIZES = Sizes()
BATCH, PADDED = 8, 50304
TOKENS = SIZES.length * BATCH


class Clock:
    """A recorder of the times of steps, and of the memory on top of the imports."""

    def __init__(self) -> None:
        self.stamps = [time.perf_counter()]
        self.resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def step(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.stamps.append(time.perf_counter())
        if len(self.stamps) == 2:
            self.first = time.time()

    def result(self, device: str, tokens: float = TOKENS) -> Result:
        import torch

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.resident
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated()
        seconds = [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)][2:]
        return {
            "tokens_per_second": tokens / statistics.median(seconds),
            "peak_mb": peak / 2**20,
            "startup_s": self.first - float(os.environ["BENCHMARK_STARTED"]),
        }


def reference_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=SIZES.layers,
        n_embd=SIZES.hidden,
        n_head=SIZES.heads,
        n_positions=SIZES.length,
        vocab_size=PADDED,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def bare(steps: int, precision: str, device: str) -> Result:
    """Train in a bare PyTorch loop."""
    import torch

    clock = Clock()
    model = reference_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    data = torch.as_tensor(SIZES.samples())
    autocast = torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(data)
        ids = data[rows, :-1].to(device)
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        clock.step()
    return clock.result(device)


def hf_trainer(steps: int, precision: str, device: str) -> Result:
    """Train with transformers' Trainer."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock()
    model = reference_model()

    class Stamp(TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            clock.step()

    data = [{"input_ids": torch.as_tensor(row[:-1]), "labels": torch.as_tensor(row[:-1])} for row in SIZES.samples()]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-4,
        weight_decay=0.01,
        max_grad_norm=1.0,
        bf16=precision == "bf16",
        use_cpu=device == "cpu",
        report_to=[],
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=device == "cuda",
    )
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Stamp()]).train()
    return clock.result(device)


def nanogpt(steps: int, precision: str, device: str) -> Result:
    """Train nanoGPT's model without dropout, with its optimizer."""
    import torch
    import transformers  # noqa: F401 - imported before the clock starts, as in the others
    from nanogpt import train

    clock = Clock()
    sizes = {
        "n_layer": SIZES.layers, "n_head": SIZES.heads, "n_embd": SIZES.hidden, "block_size": SIZES.length,
        "vocab_size": PADDED,
    }  # fmt: skip
    data = torch.as_tensor(SIZES.samples()).to(device)
    batches = (data[torch.arange(step * BATCH, (step + 1) * BATCH) % len(data)] for step in range(steps))
    train(Path(os.environ["BENCHMARK_NANOGPT"]), sizes, batches, device, precision, False, clock.step)
    return clock.result(device)


def crosstrain(steps: int, precision: str, device: str, dropout: float = 0.1, **options: Any) -> Result:
    """Run the platform as its users do, from the tokens on disk to the checkpoint at the end."""
    # As under `train.py`, crosstrain is imported before torch, because it sets a variable that torch's threads read.
    from crosstrain.cli.main import main as command_line
    from crosstrain.config.registry import registry

    # isort: split
    import torch  # noqa: F401 - imported before the clock starts, as in the others
    import transformers  # noqa: F401

    clock = Clock()
    tracker = registry.get("tracker", "jsonl")
    log = tracker.log

    def stamped(self: Any, row: dict[str, Any]) -> None:
        log(self, row)
        clock.step()

    tracker.log = stamped
    with tempfile.TemporaryDirectory() as folder:
        run = {
            "output_dir": f"{folder}/out", "max_iters": steps, "micro_batch_size": BATCH, "amp": precision,
            "device": device, "log_interval": 1, **options,
        }  # fmt: skip
        project = write_project(Path(folder), SIZES, run, dropout=dropout)
        sys.stdout, real = open(os.devnull, "w"), sys.stdout  # noqa: SIM115
        code = command_line(["train", "--cfg-path", str(project), "--nproc-per-node", "1"])
        sys.stdout = real
        assert code == 0
    return clock.result(device)


BASELINES = {"bare loop": bare, "HF Trainer": hf_trainer, "not compiled": crosstrain, "nanogpt": nanogpt}
CONTESTANTS = {
    "crosstrain": crosstrain,
    "compiled": partial(crosstrain, compile="blocks"),
    "without dropout": partial(crosstrain, dropout=0.0),
    **BASELINES,
}
OURS = {"not compiled": "compiled", "nanogpt": "without dropout"}  # baseline -> what it is compared with


@contextmanager
def busy_process() -> Iterator[None]:
    """Keep one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--against", nargs="+", choices=BASELINES, default=["bare loop", "HF Trainer"])
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--beside-busy-process", action="store_true")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        sys.path.insert(0, str(ROOT / "platform"))
        result = CONTESTANTS[arguments.contestant](arguments.steps, arguments.precisions[0], arguments.device)
        print(json.dumps(result))
        return

    rows = []
    for precision in arguments.precisions:

        def run(name: str, precision: str = precision) -> Result:
            flags = ("--precisions", precision, "--steps", str(arguments.steps), "--device", arguments.device)
            with busy_process() if arguments.beside_busy_process else nullcontext():
                started = {"BENCHMARK_STARTED": str(time.time()), "BENCHMARK_NANOGPT": str(arguments.nanogpt)}
                return child(__file__, "--contestant", name, *flags, env=started)

        ours = {other: OURS.get(other, "crosstrain") for other in arguments.against}
        results = rounds([*dict.fromkeys(ours.values()), *ours], run, arguments.rounds)
        for other, own in ours.items():
            keys = ("tokens_per_second", "peak_mb", "startup_s")
            rows.append([precision, other, *(ratio(results[own], results[other], key) for key in keys)])
    print(table(["precision", "against", "tokens/s", "peak memory", "start to first step"], rows))


if __name__ == "__main__":
    main()
