"""Compare whole GRPO steps, sampling and learning, with TRL's GRPOTrainer and transformers' generate.

    python benchmarks/grpo.py [--rounds 3] [--steps 6]

Needs trl, accelerate and datasets. Both train the same Qwen2 with random weights on the same prompts of 16 words, with
8 prompts and 8 completions each per step, in fp32. Each side runs in processes of its own, in turns. The figures are
sampled tokens per second of a step, without the first two steps, and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, child, ratio, rounds, table

sys.path.insert(0, str(ROOT / "tests"))

import numpy as np
import torch
import yaml

MODEL = {
    "model_type": "qwen2", "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 8191,
}  # fmt: skip
WORDS, UNKNOWN = 8000, 8190  # the end token is 8191
PROMPTS, COMPLETIONS, RATE = 8, 8, 1e-5
TEMPLATE = (
    "{% for m in messages %}{{ m.content + ' ' }}{% if m.role == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
)


def prompts() -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(f"w{word}" for word in rng.integers(0, WORDS, 16)) for _ in range(256)]


def write(folder: Path, new: int) -> Path:
    """Write the model, a tokenizer of whole words and a project file; return the project file."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(UNKNOWN)} | {"<unknown>": UNKNOWN}
    backend = Tokenizer(models.WordLevel(words, "<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", unk_token="<unknown>", pad_token="<end>",
        chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with (folder / "prompts.jsonl").open("w") as file:
        for text in prompts():
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "w0"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    objective = {
        "name": "grpo", "rewards": [{"name": "matches", "pattern": ".*w1.*"}], "completions": COMPLETIONS,
        "max_new_tokens": new,
    }  # fmt: skip
    project = {
        "model": {"arch": "causal_lm", "pretrained": str(folder / "model"), "make_vocab_size_divisible_by": 1},
        "datasets": {
            "asked": {
                "name": "prompts", "path": str(folder / "prompts.jsonl"), "tokenizer": str(folder / "model"),
                "seq_length": 64,
            }
        },
        "run": {
            "runner": "ddp", "output_dir": str(folder / "out"), "max_iters": 100, "global_batch_size": PROMPTS,
            "objective": objective, "init_lr": RATE, "lr_sched": "constant", "weight_decay": 0.0,
            "grad_norm_clip": 1.0, "device": "cpu", "eval_interval": None,
        },
    }  # fmt: skip
    path = folder / "project.yaml"
    path.write_text(yaml.safe_dump(project))
    return path


def ours(folder: Path, steps: int, new: int) -> list[float]:
    """Return the seconds of each step."""
    from crosstrain.config.load import load_config
    from crosstrain.config.registry import registry
    from fixtures_ranks import make_trainer

    config = load_config(folder / "project.yaml")
    registry.get("dataset", "prompts").prepare(config.datasets["asked"].options)
    trainer = make_trainer(str(folder / "project.yaml"), (), bare=True)
    stream, seconds = trainer.batches(), []
    for _ in range(steps):
        begun = time.perf_counter()
        trainer.train_step(stream)
        seconds.append(time.perf_counter() - begun)
    return seconds


def theirs(folder: Path, steps: int, new: int) -> list[float]:
    """Return the seconds of each step of TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.begun)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float("w1" in text) for text in completions]

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], max_steps=steps, learning_rate=RATE,
        per_device_train_batch_size=PROMPTS * COMPLETIONS, num_generations=COMPLETIONS, max_completion_length=new,
        beta=0.0, loss_type="grpo", temperature=1.0, top_k=0, lr_scheduler_type="constant", max_grad_norm=1.0,
        save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model", padding_side="left"),
        reward_funcs=[reward],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts()]),
        callbacks=[Clock()],
    )
    trainer.train()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--new", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--side", choices=("crosstrain", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        side = ours if asked.side == "crosstrain" else theirs
        seconds = statistics.median(side(asked.folder, asked.steps, asked.new)[2:])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        tokens = PROMPTS * COMPLETIONS * asked.new
        print(json.dumps({"tokens_per_second": tokens / seconds, "step_ms": seconds * 1000, "peak_mb": peak}))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), asked.new)
        arguments = ["--steps", str(asked.steps), "--new", str(asked.new), "--folder", folder]
        found = rounds(["crosstrain", "trl"], lambda side: child(__file__, "--side", side, *arguments), asked.rounds)
    rows = []
    for key in ("tokens_per_second", "peak_mb"):
        medians = [f"{statistics.median(result[key] for result in found[side]):.0f}" for side in found]
        rows.append([key, *medians, ratio(found["crosstrain"], found["trl"], key)])
    print(table(["", *found, "ratio"], rows))


if __name__ == "__main__":
    main()
