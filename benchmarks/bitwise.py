"""Train models to the same bits under many runners and numbers of ranks, and print the digests as a table.

    python benchmarks/bitwise.py [--steps 100] [--rows gpt2 qwen2 ...] [--folder output/bitwise]

There are about 500 runs of seconds each. Finished runs in the folder are not repeated. A row has one digest of the
weights and one of the moments if all runs agree; otherwise the table names the runs that differ. Runs that are refused
are listed below the table, with the reason. Each rank uses one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, table
from forks import Refused, train
from tiny import GPT2, LORA, MODELS, causal_lm, write_data, write_project

from conftest import logged_step
from crosstrain.checkpoint.digests import recorded
from crosstrain.checkpoint.folders import find_checkpoint

SHARDED = {"bitwise": {"width": 4}}
SLICED: dict[str, Any] = {"bitwise": {"slices": 4}}
BOTH: dict[str, Any] = {"bitwise": {"width": 4, "slices": 2}}
FOUR_KEYS = causal_lm("qwen2", num_key_value_heads=4, attention_dropout=0.1)
RUN = {
    "bitwise": True, "device": "cpu", "micro_batch_size": 1, "save_interval": 10, "keep_last": 1, "log_interval": 1,
    "init_lr": 3e-3, "warmup_steps": 5, "grad_norm_clip": 0.5, "max_iters": 1, "global_batch_size": 12,
}  # fmt: skip
# Rounds of accumulation are 12, 6, 4 and 3 in the first list, and 4, 2 and 1 in the second.
LAYOUTS = {
    12: [
        "ddp@1", "ddp@2", "ddp@3", "ddp@4", "fsdp@2", "fsdp@4", "zero1@2", "zero1@4", "zero2@2", "zero2@4", "zero3@2",
        "zero3@4", "zero2_offload@2", "pp2@2", "pp2@4", "changing", "killed",
    ],
    4: ["ddp@1", "ddp@4", "fsdp@4", "zero1@4", "zero2@4", "zero3@4", "zero2@2", "pp2@4"],
}  # fmt: skip
WIDE = {
    12: [
        "ddp@1", "tp1@1", "tp2@2", "tp4@4", "tp2@4", "tp2_pp2@4", "tp2_sp@2", "tp2_sp@4", "fsdp@2", "zero1@2",
        "zero3@2", "ddp@4",
    ],
}  # fmt: skip
IN_SLICES = {
    12: [
        "ddp@1", "ddp@4", "fsdp@2", "zero2@2", "zero3@2", "pp2@2", "cp2@2", "cp2_pp2@4", "cp2_ddp@2", "cp2_ddp@4",
        "cp4_fsdp@4", "cp2_zero1@2", "cp4_zero2@4", "cp2_zero3@4",
    ],
}  # fmt: skip
WIDE_IN_SLICES = {12: ["ddp@1", "ddp@4", "fsdp@2", "zero3@2", "tp2@2", "tp4@4", "cp2@2", "tp2_cp2@4", "cp2_fsdp@4"]}
# row -> model, data, further options of `run`, and layouts for each number of micro batches per step
ROWS: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[int, list[str]]]] = {
    "gpt2": (GPT2, "text", {}, LAYOUTS),
    "qwen2": (MODELS["qwen2"], "text", {}, LAYOUTS),
    "llama_lora": (MODELS["llama"] | {"adapter": LORA}, "text", {}, LAYOUTS),
    "chat": (MODELS["qwen3_tied"], "chat", {}, LAYOUTS),
    "dpo": (GPT2 | {"dropout": 0.0}, "pairs", {"objective": {"name": "dpo", "beta": 0.3}}, LAYOUTS),
    "qwen3_moe": (MODELS["qwen3_moe"], "text", {}, LAYOUTS),
    "images": (MODELS["images"], "shapes", {}, LAYOUTS),
    "gpt2, width 4": (GPT2, "text", SHARDED, WIDE),
    "qwen2, width 4": (FOUR_KEYS, "text", SHARDED, WIDE),
    "llama_lora, width 4": (causal_lm("llama", num_key_value_heads=4) | {"adapter": LORA}, "text", SHARDED, WIDE),
    "mixtral, width 4": (
        causal_lm("mixtral", num_key_value_heads=4, num_local_experts=4, attention_dropout=0.1),
        "text",
        SHARDED,
        WIDE,
    ),
    "gpt2, slices 4": (GPT2, "text", SLICED, IN_SLICES),
    "qwen2, slices 4": (FOUR_KEYS, "text", SLICED, IN_SLICES),
    "llama_lora, slices 4": (causal_lm("llama", num_key_value_heads=4) | {"adapter": LORA}, "text", SLICED, IN_SLICES),
    "chat, slices 4": (MODELS["qwen3_tied"], "chat", SLICED, IN_SLICES),
    "qwen2, width 4, slices 2": (FOUR_KEYS, "text", BOTH, WIDE_IN_SLICES),
}
WITH_EXPERTS = ["qwen3_moe", "mixtral, width 4"]
EXPERTS = ["ep2@2", "ep2@4", "pp2_ep2@4", "tp2_ep2@4"]  # for models with experts; tensor parallelism needs a width
MEGATRON = {
    "pp2": {"pipeline_parallel": 2}, "tp1": {}, "tp2": {"tensor_parallel": 2}, "tp4": {"tensor_parallel": 4},
    "tp2_pp2": {"tensor_parallel": 2, "pipeline_parallel": 2}, "ep2": {"expert_parallel": 2},
    "tp2_sp": {"tensor_parallel": 2, "sequence_parallel": True}, "cp2": {"context_parallel": 2},
    "cp2_pp2": {"context_parallel": 2, "pipeline_parallel": 2},
    "tp2_cp2": {"tensor_parallel": 2, "context_parallel": 2},
    "tp2_ep2": {"tensor_parallel": 2, "expert_parallel": 2}, "pp2_ep2": {"pipeline_parallel": 2, "expert_parallel": 2},
}  # fmt: skip
CHANGES = ["zero3@2", "ddp@4", "fsdp@3", "zero1@1", "ddp@3"]  # runner and ranks of every fifth of a run
KILLS = 10


class Runs:
    """Runs of one row, precision and batch size."""

    def __init__(self, folder: Path, project: Path, batch: int, amp: str, steps: int) -> None:
        self.folder, self.project, self.batch, self.amp, self.steps = folder, project, batch, amp, steps

    def digest(self, layout: str) -> str:
        """Return the beginnings of the digests of a run's weights and moments; it is trained unless it is finished."""
        run = self.folder / f"{self.amp}_{self.batch}_{layout}"
        done = run / "done"
        if not done.exists():
            if layout == "changing":
                for number, part in enumerate(CHANGES, 1):
                    self.train(run, part, self.steps * number // len(CHANGES))
            elif layout == "killed":
                self.killed(run)
            else:
                self.train(run, layout, self.steps)
            done.touch()
        found = recorded(find_checkpoint(run))
        return f"{found['weights'][:8]} {found['moments'][:8]}"

    def train(self, run: Path, layout: str, last: int, killed_when: Callable[[], bool] | None = None) -> bool:
        """Train up to step `last`; return False if the run was killed."""
        name, _, ranks = layout.partition("@")
        runner = name
        if name in MEGATRON:
            runner = json.dumps({"name": "megatron", **MEGATRON[name]})
        elif degree := re.fullmatch(r"cp(\d)_(\w+)", name):
            runner = json.dumps({"name": degree[2], "context_parallel": int(degree[1])})
        length = [f"run.max_iters={last}", f"run.lr_decay_iters={self.steps}"]
        where = [f"run.output_dir={run}", f"run.runner={runner}", f"run.amp={self.amp}"]
        options = [*length, *where, f"run.global_batch_size={self.batch}"]
        return train(self.project, options, int(ranks), killed_when=killed_when)

    def killed(self, run: Path) -> None:
        """Train on two ranks, and kill them with SIGKILL in ten random steps."""
        moments = sorted(random.Random(0).sample(range(1, self.steps), KILLS))
        for step in moments:
            if self.train(run, "ddp@2", self.steps, lambda step=step: logged_step(run) >= step):  # type: ignore[misc]
                raise RuntimeError(f"{run} ended before it was killed in step {step}")
        self.train(run, "ddp@2", self.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--amp", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--folder", type=Path, default=ROOT / "output" / "bitwise")
    arguments = parser.parse_args()
    data, rows, refused = write_data(arguments.folder / "data"), [], dict[str, list[str]]()
    for row in arguments.rows:
        model, dataset, run, batches = ROWS[row]
        (arguments.folder / row).mkdir(exist_ok=True)
        project = write_project(arguments.folder / row / "project.yaml", model, data[dataset], RUN | run)
        for amp in arguments.amp:
            for batch, layouts in batches.items():
                layouts = [*layouts, *(EXPERTS if row in WITH_EXPERTS else [])]
                runs, found = Runs(arguments.folder / row, project, batch, amp, arguments.steps), dict[str, str]()
                for layout in layouts:
                    try:
                        found[layout] = runs.digest(layout)
                    except Refused as refusal:
                        refused.setdefault(str(refusal), []).append(f"{row} {layout}")
                others = [name for name, value in found.items() if value != found["ddp@1"]]
                equal = f"{len(found) - len(others)} of {len(layouts)}"
                rows.append([row, amp, batch, found["ddp@1"], equal, ", ".join(others)])
                print(*rows[-1], flush=True)
    print(table(["row", "precision", "micro batches", "weights and moments", "equal", "different"], rows))
    for sentence, where in refused.items():
        print(f"- {', '.join(dict.fromkeys(where))}: {sentence}")


if __name__ == "__main__":
    main()
