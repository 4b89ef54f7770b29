"""Compare the memory that `plan` predicts with measurements of small training runs in CPU processes.

    python benchmarks/plan_memory.py                # twelve configurations drawn with seed 1
    python benchmarks/plan_memory.py --quick        # two
    python benchmarks/plan_memory.py --seed 7 --count 3
    python benchmarks/plan_memory.py --experts      # a mixture of experts, in one process and with expert parallelism

The measured value is the highest resident memory (VmHWM) of any rank over three steps, minus the memory before the
training. At that point, the rank has imported all modules that a run with a tiny model imports, and has trained one
layer. Memory-mapped pages of files are subtracted too: they contain code of libraries, loaded when it first runs. glibc
is configured to return freed blocks at once, so that they do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, Sizes, table, write_project

# Runner -> numbers of ranks to draw from.
RUNNERS = {
    "ddp": (1, 2, 4), "fsdp": (2, 4), "zero0": (2,), "zero1": (2, 4), "zero2": (2, 4), "zero3": (2, 4),
    "megatron_tp2": (2, 4), "megatron_pp2": (2, 4), "megatron_tp2_sp": (2,), "megatron_tp2_zero1": (4,),
    "megatron_tp2_fsdp": (4,),
}  # fmt: skip
SHARED = {"ddp": 1, "megatron_ep2": 2, "megatron_ep4": 4, "megatron_tp2_ep2": 4}
MIXTURE = {
    "layers": 4, "hidden": 256, "length": 128, "vocabulary": 8192, "micro": 4, "accumulation": 2, "mode": "none",
    "amp": "fp32", "experts": 16,
}  # fmt: skip
BAR = 0.15  # largest accepted error, as a fraction of the measured memory


def draw(seed: int, count: int) -> list[dict[str, Any]]:
    """Draw random configurations: sizes, batch, precision, gradient checkpointing and runner."""
    rng, drawn = random.Random(seed), []
    for _ in range(count):
        runner = rng.choice(sorted(RUNNERS))
        mode = rng.choice(["none", "full", "none" if runner == "zero3" else "selective"])
        hidden = rng.choice([256, 384, 512])
        drawn.append(
            {
                "runner": runner,
                "ranks": rng.choice(RUNNERS[runner]),
                "layers": rng.choice([4, 6, 8]),
                "hidden": hidden,
                "length": rng.choice([128, 256]),
                "vocabulary": rng.choice([8192, 30000, 50257]),
                "micro": rng.choice([2, 4, 8]),
                "accumulation": rng.choice([1, 2, 4]),
                "mode": mode,
                "amp": rng.choice(["fp32", "bf16"]),
            }
        )
    return drawn


def project_of(folder: Path, c: dict[str, Any]) -> Path:
    """Write the project file of a configuration, and return its path."""
    run = {
        "runner": c["runner"], "output_dir": f"{folder}/run", "max_iters": 3, "micro_batch_size": c["micro"],
        "accum_grad_iters": c["accumulation"], "amp": c["amp"], "gradient_checkpointing": c["mode"], "device": "cpu",
        "save_in_background": False,
    }  # fmt: skip
    sizes = Sizes(c["layers"], c["hidden"], c["hidden"] // 64, c["length"], c["vocabulary"])
    project = write_project(folder, sizes, run)
    if "experts" in c:
        config = {
            "model_type": "qwen3_moe", "vocab_size": c["vocabulary"], "hidden_size": c["hidden"],
            "num_hidden_layers": c["layers"], "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads,
            "max_position_embeddings": c["length"], "num_experts": c["experts"], "num_experts_per_tok": 2,
            "moe_intermediate_size": 2 * c["hidden"],
        }  # fmt: skip
        document = json.loads(project.read_text()) | {"model": {"arch": "causal_lm", "config": config}}
        project.write_text(json.dumps(document))
    return project


def predict(project: Path, ranks: int) -> tuple[int, dict[str, int]]:
    """Run `plan` in a new process; return the predicted bytes of the fullest rank, and their parts."""
    out = project.parent / "plan.json"
    command = ["-m", "crosstrain", "plan", "--no-presets", "--cfg-path", str(project), "--world-size", str(ranks)]
    subprocess.run([sys.executable, *command, "--output", str(out)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    memory = json.loads(out.read_text())["memory"]
    return memory["device_total"] + sum(memory["host"].values()), memory["device"] | memory["host"]


def measure(c: dict[str, Any]) -> int:
    """Return the measured bytes of the fullest rank, without the imports of a run with a tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = project_of(Path(folder), c | {"layers": 4, "hidden": 128, "length": 32, "vocabulary": 8192, "micro": 1})
        modules = Path(folder) / "modules.json"
        _run(tiny, c["ranks"], modules)
        whole = Path(folder) / "whole"
        whole.mkdir()
        return _run(project_of(whole, c), c["ranks"], modules)


def _run(project: Path, ranks: int, modules: Path) -> int:
    """Train on `ranks` ranks, and return the bytes of the fullest rank.

    modules: JSON file with the modules to import before the measurement; written if it does not exist.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, __file__, "--rank-of", str(project), str(modules)]
    started = [
        subprocess.Popen(command, env=base | {"RANK": str(n), "LOCAL_RANK": str(n)}, stdout=subprocess.PIPE, text=True)
        for n in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"a rank failed: {outputs}")
    return max(int(out.splitlines()[-1]) for out in outputs)


def rank_of(project: str, modules: Path) -> None:
    """Import the modules, train, and print this rank's peak memory."""
    known = modules.exists()
    for name in json.loads(modules.read_text()) if known else ():
        with contextlib.suppress(Exception):  # some are created at run time and cannot be imported
            importlib.import_module(name)
    from crosstrain.config.load import load_config
    from crosstrain.engine.build import make_model, make_runner
    from crosstrain.modeling.meta_init import parameters_on_meta
    from crosstrain.training.worker import train_worker

    config = load_config(project)
    make_runner(config)
    with parameters_on_meta():
        make_model(config)
    _warm_up()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, files = _status("VmRSS"), _status("RssFile")
    train_worker(config.plain, True)
    print(_status("VmHWM") - before - max(0, _status("RssFile") - files), flush=True)
    if not known and os.environ["RANK"] == "0":
        modules.write_text(json.dumps(list(sys.modules)))
    os._exit(0)


def _warm_up() -> None:
    """Train a layer, because libraries load and compile kernels at first use; this counts as part of the imports."""
    import torch

    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters())
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            layer(torch.zeros(64, 64)).sum().backward()
        optimizer.step()


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="two configurations")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts under a few runners")
    parser.add_argument("--only", type=json.loads, help="one configuration, as JSON")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        return rank_of(arguments.rank_of[0], Path(arguments.rank_of[1]))
    drawn = [arguments.only] if arguments.only else draw(arguments.seed, 2 if arguments.quick else arguments.count)
    if arguments.experts:
        drawn = [MIXTURE | {"runner": runner, "ranks": ranks} for runner, ranks in SHARED.items()]
    rows, errors = [], []
    for c in drawn:
        with tempfile.TemporaryDirectory() as folder:
            predicted, parts = predict(project_of(Path(folder), c), c["ranks"])
        measured = measure(c)
        errors.append(predicted / measured - 1)
        shape = f"{c['layers']} x {c['hidden']}, V {c['vocabulary']}"
        batch = f"{c['micro']} x {c['accumulation']} x {c['length']}"
        rows.append(
            [
                f"{c['runner']}@{c['ranks']}",
                shape,
                batch,
                f"{c['amp']}, {c['mode']}",
                f"{predicted / 2**20:.0f}",
                f"{measured / 2**20:.0f}",
                f"{errors[-1]:+.0%}",
            ]
        )
        print(rows[-1], {k: round(v / 2**20) for k, v in parts.items()}, file=sys.stderr, flush=True)
    header = ["runner", "model", "micro x accumulation x length", "precision", "plan MiB", "measured MiB", "error"]
    print(table(header, rows))
    within = sum(abs(error) <= BAR for error in errors)
    print(f"\n{within} of {len(errors)} within {BAR:.0%}; median error {statistics.median(map(abs, errors)):.1%}")
    if within < len(errors):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
