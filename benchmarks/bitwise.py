"""Train models to the same bits under many runners and numbers of ranks, and print the digests as a table.

    python benchmarks/bitwise.py [--steps 100] [--models gpt2 qwen2 ...] [--folder output/bitwise]

A run takes up to a minute, and there are about 150. Finished runs in the folder are not repeated. A row has one digest
of the weights if all runs agree; otherwise the table names the runs that differ. Each rank uses one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import ROOT, table

sys.path.insert(0, str(ROOT / "platform"))

from crosstrain.checkpoint.digests import recorded
from crosstrain.checkpoint.folders import find_checkpoint

SIZES = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
GPT2 = {"arch": "gpt2", "vocab_size": 4096, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 256, "dropout": 0.1}
LORA = {"name": "lora", "rank": 8, "dropout": 0.1}
LLAMA = {"arch": "causal_lm", "config": {"model_type": "llama", **SIZES}, "adapter": LORA}
TEXT = ("projects/quickstart.yaml", ["datasets.stdlib.seq_length=64"])
CHAT = ["datasets.docstrings.tokenizer=output/gpt2_chat_sft", f"model={json.dumps(GPT2)}", "model.dropout=0"]
MODELS: dict[str, tuple[str, list[str]]] = {
    "gpt2": (TEXT[0], [*TEXT[1], f"model={json.dumps(GPT2)}"]),
    "qwen2": (TEXT[0], [*TEXT[1], f"model={json.dumps({'arch': 'qwen', **SIZES})}"]),
    "llama_lora": (TEXT[0], [*TEXT[1], f"model={json.dumps(LLAMA)}"]),
    "dpo": ("projects/gpt2_chat_dpo.yaml", CHAT),
    "images": ("projects/blip2_qwen_shapes.yaml", ["datasets.shapes.images=2400", "datasets.shapes.held_out=8"]),
}
COMMON = [
    "run.bitwise=true", "run.device=cpu", "run.global_batch_size=12", "run.micro_batch_size=1",
    "run.eval_interval=null", "run.sample_prompts=[]", "run.save_interval=20", "run.keep_last=1", "run.log_interval=20",
]  # fmt: skip
ZERO = [f"zero{stage}@{ranks}" for stage in (1, 2, 3) for ranks in (2, 4)]
LAYOUTS = ["ddp@1", "ddp@2", "ddp@3", "ddp@4", "fsdp@2", "fsdp@4", *ZERO]
PIPELINES = ["megatron_pp2@2", "megatron_pp2@4"]  # not for models of several parts
CHANGES = ["zero3@2", "ddp@4", "fsdp@3", "zero1@1", "ddp@3"]  # runner and ranks of every fifth of a run


def train(project: str, options: list[str], folder: Path, layout: str, steps: int, last: int) -> None:
    """Train up to step `last` of a run of `steps` steps."""
    runner, _, ranks = layout.partition("@")
    length = [f"run.max_iters={last}", f"run.lr_decay_iters={steps}", "run.warmup_fraction=null", "run.warmup_steps=5"]
    given = [*COMMON, *options, *length, f"run.runner={runner}", f"run.output_dir={folder}"]
    command = [sys.executable, "train.py", "--cfg-path", project, "--nproc-per-node", ranks, "--options", *given]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def digest(model: str, amp: str, layout: str, steps: int, folder: Path) -> str:
    """Return the digests of a run's weights and moments; the run is trained unless it is finished."""
    project, options = MODELS[model]
    run, given = folder / f"{model}_{amp}_{layout}", [*options, f"run.amp={amp}"]
    done = run / "done"
    if not done.exists():
        parts = CHANGES if layout == "changing" else [layout]
        for number, part in enumerate(parts, 1):
            train(project, given, run, part, steps, steps * number // len(parts))
        done.touch()
    found = recorded(find_checkpoint(run))
    return f"{found['weights'][:12]} {found['moments'][:12]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--folder", type=Path, default=ROOT / "output" / "bitwise")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        layouts = [*LAYOUTS, *(PIPELINES if model != "images" else []), "changing"]
        for amp in ("fp32", "bf16"):
            found = {name: digest(model, amp, name, arguments.steps, arguments.folder) for name in layouts}
            first = found["ddp@1"]
            others = [name for name, value in found.items() if value != first]
            rows.append([model, amp, first, f"{len(layouts) - len(others)} of {len(layouts)}", ", ".join(others)])
            print(*rows[-1], flush=True)
    print(table(["model", "precision", "weights and moments of ddp@1", "equal", "different"], rows))


if __name__ == "__main__":
    main()
