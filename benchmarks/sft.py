"""Compare packed fine-tuning on conversations with TRL's SFTTrainer: speed and memory.

    python benchmarks/sft.py [--rounds 5] [--steps 8] [--precisions fp32 bf16] [--device cpu]

All contestants have the same conversations, chat template, Llama, batch of packed rows, precision and optimizer, and
train only on the assistant's words. Each runs in its own process, in turn. TRL packs in its own way: best fit
decreasing, without padding. Both programs run twice: with the batch in one pass (TRL makes it one long row), and row by
row with gradient accumulation. There is no activation checkpointing. Tokens per second count all tokens of the
conversations, from the median step after the first two. Peak memory is the process's highest resident memory minus the
memory after the imports (on a GPU, torch's peak). Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, Result, child, ratio, rounds, table
from step import Clock

ROWS, LENGTH, CONVERSATIONS = 4, 512, 600
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """Write a model with random weights and a tokenizer of 2,000 tokens, and conversations of 40 to 450 tokens."""
    import torch
    from crosstrain_plugins.builtin.commands.prepare.train_bpe import train_bpe
    from transformers import AddedToken, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))) for _ in range(1500)]
    fast = PreTrainedTokenizerFast(tokenizer_object=train_bpe([" ".join(words)] * 3, 2000).backend)
    fast.add_special_tokens(
        {"eos_token": AddedToken("<|im_end|>", normalized=False), "pad_token": "<|pad|>", "bos_token": "<|im_start|>"}
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50304,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        bos_token_id=fast.bos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    with open(folder / "chat.jsonl", "w") as file:
        for _ in range(CONVERSATIONS):
            size = int(min(100, 12 * 1.5 ** rng.expovariate(0.25)))
            turns = [" ".join(rng.choices(words, k=size)) for _ in range(2)]
            messages = [{"role": r, "content": c} for r, c in zip(("user", "assistant"), turns, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")


def trl(folder: Path, steps: int, precision: str, device: str, rows: int) -> Result:
    """Train with SFTTrainer as in its documentation, with `rows` rows of the batch per pass."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    clock = Clock()

    class Stamp(TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            clock.step()

    arguments = SFTConfig(
        output_dir=str(folder / f"trl{rows}"),
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=ROWS // rows,
        learning_rate=1e-4,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=precision == "bf16",
        use_cpu=device == "cpu",
        report_to=[],
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        packing=True,
        max_length=LENGTH,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    data = load_dataset("json", data_files=str(folder / "chat.jsonl"), split="train", cache_dir=str(folder / "cache"))
    trainer = SFTTrainer(model=str(folder / "model"), args=arguments, train_dataset=data, callbacks=[Stamp()])
    trainer.train()
    packed = trainer.train_dataset
    tokens = sum(len(ids) for ids in packed["input_ids"]) / len(packed) * ROWS
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return _result(clock, device, tokens, losses[-1])


def crosstrain(folder: Path, steps: int, precision: str, device: str, rows: int) -> Result:
    """Run the platform as its users do, from the conversations on disk to the checkpoint at the end."""
    import torch  # noqa: F401 - imported before the clock starts, as in `trl`
    import transformers  # noqa: F401

    from crosstrain.cli.main import main as command_line
    from crosstrain.config.registry import registry

    clock, kept, counts = Clock(), [], []
    tracker = registry.get("tracker", "jsonl")
    log = tracker.log

    def stamped(self: Any, row: dict[str, Any]) -> None:
        log(self, row)
        kept.append(row["loss"])
        clock.step()

    tracker.log = stamped
    chat = registry.get("dataset", "chat")
    get = chat.get

    def counted(self: Any, index: int, rng: Any) -> Any:
        sample = get(self, index, rng)
        counts.append(len(sample["input_ids"]))
        return sample

    chat.get = counted
    project = folder / "project.yaml"
    data = {
        "name": "chat", "path": str(folder / "chat.jsonl"), "tokenizer": str(folder / "model"), "seq_length": LENGTH,
        "packing": True,
    }  # fmt: skip
    run = {
        "output_dir": tempfile.mkdtemp(dir=folder), "max_iters": steps, "global_batch_size": ROWS,
        "micro_batch_size": rows, "amp": precision, "device": device, "log_interval": 1, "init_lr": 1e-4,
        "weight_decay": 0.0, "num_workers": 0,
    }  # fmt: skip
    model = {"arch": "causal_lm", "pretrained": str(folder / "model")}
    project.write_text(json.dumps({"model": model, "datasets": {"chat": data}, "run": run}))
    sys.stdout, real = open(os.devnull, "w"), sys.stdout  # noqa: SIM115
    code = command_line(["train", "--cfg-path", str(project), "--nproc-per-node", "1"])
    sys.stdout = real
    assert code == 0
    return _result(clock, device, sum(counts) / len(counts) * ROWS, kept[-1])


def _result(clock: Clock, device: str, tokens: float, loss: float) -> Result:
    found = clock.result(device, tokens)
    return {key: found[key] for key in ("tokens_per_second", "peak_mb")} | {"tokens": tokens, "loss": loss}


CONTESTANTS = {
    "crosstrain": (crosstrain, ROWS),
    "crosstrain, row by row": (crosstrain, 1),
    "TRL": (trl, ROWS),
    "TRL, row by row": (trl, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "platform"))
    if arguments.contestant:
        work, at_once = CONTESTANTS[arguments.contestant]
        print(json.dumps(work(arguments.folder, arguments.steps, arguments.precisions[0], arguments.device, at_once)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        make(Path(name))
        for precision in arguments.precisions:

            def run(contestant: str, precision: str = precision) -> Result:
                return child(
                    __file__,
                    "--contestant",
                    contestant,
                    "--precisions",
                    precision,
                    "--steps",
                    str(arguments.steps),
                    "--device",
                    arguments.device,
                    "--folder",
                    name,
                    env={"BENCHMARK_STARTED": "0"},
                )

            results = rounds(list(CONTESTANTS), run, arguments.rounds)
            for ours, other in (("crosstrain", "TRL"), ("crosstrain, row by row", "TRL, row by row")):
                keys = ("tokens_per_second", "peak_mb")
                rows.append([precision, other, *(ratio(results[ours], results[other], key) for key in keys)])
    print(table(["precision", "against", "tokens/s", "peak memory"], rows))


if __name__ == "__main__":
    main()
