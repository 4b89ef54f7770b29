"""Each program's own defaults, launch scripts and data descriptions become what they mean; nothing of them acts."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from crosstrain_plugins.builtin.commands.migrate.foreign_keys import ForeignKeys, origins
from crosstrain_plugins.builtin.commands.migrate.migration import migrate
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conftest import ENVIRONMENT, ROOT, Workspace
from crosstrain.cli.main import main
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.utils.errors import ConfigError

Migrated = tuple[dict[str, Any], str, int | None]


def migrated(folder: Path, name: str, content: Any, file: str = "a.json") -> Migrated:
    """Return the project, its notes and its ranks."""
    (path := folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    text, notes, ranks = migrate(path, origins()[name])
    return yaml.safe_load(text), "\n".join(notes), ranks


def complete(tree: Any, key: str = "") -> Any:
    """Return a project with something in the place of each value that has yet to be given."""
    if isinstance(tree, dict):
        return {name: complete(inner, name) for name, inner in tree.items()}
    numbers = {"max_iters": 5, "micro_batch_size": 1, "init_lr": 1e-3, "seq_length": 8, "vocab_size": 60}
    return numbers.get(key, "blip2_qwen" if key == "arch" else "x") if tree == "???" else tree


def at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[part]
    return tree


DEFAULTS = yaml.safe_load((ROOT / "tests" / "config" / "origin_defaults.yaml").read_text())


@pytest.mark.parametrize("case", DEFAULTS)
def test_a_file_that_says_nothing_has_its_programs_defaults(tmp_path: Path, case: str) -> None:
    (name,) = [stem for stem in origins() if stem in case.split(" ")]
    wanted = DEFAULTS[case]
    file, content = ("a.py", 'out_dir = "out"') if name == "nanogpt" else ("a.json", wanted["file"])
    tree, _, _ = migrated(tmp_path, name, content, file)
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(complete(tree)))
    plain = load_config(tmp_path / "p.yaml", []).plain  # with Crosstrain's own defaults
    sections = {"run": plain["run"], "model": tree["model"], "data": next(iter(tree["datasets"].values()))}
    found = {f"{part}.{key}": at(sections[part], key) for part in sections for key in wanted.get(part, {})}
    assert found == {f"{part}.{key}": value for part in sections for key, value in wanted.get(part, {}).items()}


def test_defaults_of_the_installed_training_arguments(tmp_path: Path) -> None:
    theirs = {f.name: f.default for f in dataclasses.fields(_training_arguments())}
    tree, _, _ = migrated(tmp_path, "transformers", {"model_name_or_path": "m"})
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(complete(tree)))
    run = load_config(tmp_path / "p.yaml", []).run
    optimizer = run.optimizer.options
    assert (run.init_lr, run.weight_decay, run.seed) == (
        theirs["learning_rate"],
        theirs["weight_decay"],
        theirs["seed"],
    )
    assert (run.grad_norm_clip, run.max_epoch) == (theirs["max_grad_norm"], theirs["num_train_epochs"])
    assert optimizer.betas == (theirs["adam_beta1"], theirs["adam_beta2"])
    assert (optimizer.eps, optimizer.decoupled) == (theirs["adam_epsilon"], True)
    assert run.lr_sched.name == str(getattr(theirs["lr_scheduler_type"], "value", theirs["lr_scheduler_type"]))
    assert (run.micro_batch_size, run.warmup_steps or 0) == (theirs["per_device_train_batch_size"], 0)


def _training_arguments() -> type:
    from transformers import TrainingArguments

    return TrainingArguments


def test_defaults_of_the_installed_deepspeed(tmp_path: Path) -> None:
    from deepspeed.runtime import constants, lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    adam = inspect.signature(torch.optim.Adam).parameters  # whose defaults FusedAdam has
    decay = inspect.signature(lr_schedules.WarmupDecayLR).parameters
    scaler = {name: field.default for name, field in DeepSpeedFP16Config.model_fields.items()}
    file = {"optimizer": {"type": "Adam"}, "fp16": {"enabled": True}}
    tree, notes, _ = migrated(tmp_path, "deepspeed", file)
    run = tree["run"]
    assert (run["init_lr"], run["weight_decay"]) == (adam["lr"].default, 0)
    assert run["optimizer"] == {"name": "adamw"}  # betas and eps are torch's
    assert run["lr_sched"] == "constant"
    assert run["grad_norm_clip"] == constants.GRADIENT_CLIPPING_DEFAULT
    assert run["amp"] == {
        "dtype": "fp16",
        "initial_scale": 2.0 ** scaler["initial_scale_power"],
        "window": scaler["loss_scale_window"],
        "hysteresis": scaler["hysteresis"],
        "min_scale": scaler["min_loss_scale"],
    }
    assert "gradient_clipping: it is not set; DeepSpeed then clips at 1.0" in notes
    tree, notes, _ = migrated(
        tmp_path, "deepspeed", file | {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}}
    )
    run = tree["run"]
    assert (run["warmup_steps"], run["init_lr"]) == (decay["warmup_num_steps"].default, decay["warmup_max_lr"].default)
    assert (run["lr_decay_iters"], run["max_iters"], run["lr_sched"]) == (5000, 5000, "linear")
    assert "scheduler.params.total_num_steps: it is the schedule's length" in notes
    assert "scheduler.params.warmup_type: the warmup is linear" in notes or "warmup_type" in notes


@pytest.mark.parametrize(("kind", "mode", "decoupled"), [
    ("Adam", False, False), ("Adam", True, True), ("Adam", None, True), ("AdamW", False, True), ("AdamW", None, True),
])  # fmt: skip
def test_adam_of_deepspeed_has_the_decay_that_it_has_there(
    tmp_path: Path, kind: str, mode: bool | None, decoupled: bool
) -> None:
    """DeepSpeed's engine takes AdamW for the name adamw or for adam_w_mode, whose default is true."""
    params = {"lr": 0.01, "weight_decay": 0.1} | ({} if mode is None else {"adam_w_mode": mode})
    file = {"optimizer": {"type": kind, "params": params}, "train_micro_batch_size_per_gpu": 1}
    for name, content in (("deepspeed", file), ("transformers", {"deepspeed": file, "model_name_or_path": "m"})):
        tree, _, _ = migrated(tmp_path, name, content)
        options = {key: value for key, value in tree["run"]["optimizer"].items() if key != "name"}
        cls = registry.get("optimizer", "adamw")
        ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2))
        optimizer = cls([{"params": [ours], "weight_decay": 0.1}], 0.01, cls.Options(**options))
        reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], lr=0.01, weight_decay=0.1)
        for step in range(3):
            ours.grad, theirs.grad = (torch.cos(torch.arange(5.0) + step) for _ in range(2))
            optimizer.step()
            reference.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)  # rounding of the fused kernel


def test_rotary_positions_of_torchtitan(tmp_path: Path) -> None:
    """Inverse frequencies are those of its precompute_freqs_cis with scaling: below low kept, above high divided."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    tree, _, _ = migrated(tmp_path, "torchtitan", {"model": {"name": "llama3", "flavor": "8B"}})
    config = dict(tree["model"]["config"])
    found = LlamaRotaryEmbedding(AutoConfig.for_model(config.pop("model_type"), **config)).inv_freq.tolist()
    wanted = []
    for i in range(64):
        frequency = 500000.0 ** (-2 * i / 128)
        length = 2 * math.pi / frequency
        share = (8192 / length - 1.0) / (4.0 - 1.0)
        if length > 8192 / 1.0:
            frequency /= 8.0
        elif length >= 8192 / 4.0:
            frequency *= (1 - share) / 8.0 + share
        wanted.append(frequency)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert sum(abs(f - 500000.0 ** (-2 * i / 128)) > 1e-9 for i, f in enumerate(wanted)) >= 29


@pytest.mark.parametrize(("compiled", "wanted"), [
    ({"enable": True}, "blocks"), ({"enable": True, "components": ["model"]}, "blocks"),
    ({"enable": True, "components": ["loss"]}, None), ({"enable": False}, None),
])  # fmt: skip
def test_what_torchtitan_compiles(tmp_path: Path, compiled: dict[str, Any], wanted: str | None) -> None:
    tree, notes, _ = migrated(tmp_path, "torchtitan", {"compile": compiled, "training": {"steps": 5}})
    assert tree["run"].get("compile") == wanted
    assert ("compile.components: torchtitan compiles loss" in notes) == (compiled.get("components") == ["loss"])


# --- Scripts of the first Megatron, Megatron-LM 2022 and Megatron-DeepSpeed.

FIRST = """#! /bin/bash
WORLD_SIZE={gpus}
python -m torch.distributed.launch --nproc_per_node {gpus} pretrain_gpt2.py \\
  --model-parallel-size {mp} --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} \\
  --batch-size 8 --seq-length {length} --max-position-embeddings {length} --train-iters 600 \\
  --save {out} --load {out} --resume-dataloader --train-data webtext --lazy-loader \\
  --tokenizer-type GPT2BPETokenizer --cache-dir cache --split 400,300,300 --distributed-backend nccl --lr 0.00015 \\
  --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --warmup .01 --checkpoint-activations {more}--fp16
"""
MODELARTS = """#! /bin/bash
GPUS_PER_NODE={gpus}
NNODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
CHECKPOINT_PATH={out}
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank 0"
python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py --tensor-model-parallel-size 1 \\
  --pipeline-model-parallel-size 1 --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} \\
  --micro-batch-size 4 --global-batch-size 64 --seq-length {length} --max-position-embeddings {length} \\
  --train-iters 5000 --lr-decay-iters 320000 --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH --data-path data/text \\
  --vocab-file v.json --merge-file m.txt --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 0.00015 \\
  --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 \\
  --checkpoint-activations --log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10 --fp16
"""
DEEPSPEED = """deepspeed --num_nodes {nodes} --num_gpus {gpus} pretrain_gpt.py \\
  --seq-length={length} --max-position-embeddings={length} --num-layers={layers} --hidden-size={hidden} \\
  --num-attention-heads={heads} --init-method-std=0.008 --train-samples={samples} --train-tokens={tokens} \\
  --lr=1.0e-4 --min-lr=1.0e-6 --lr-warmup-tokens={warmup} --lr-decay-tokens={tokens} --lr-decay-style=cosine \\
  --adam-beta1=0.9 --adam-beta2=0.95 --deepspeed --deepspeed_config=ds.json --global-batch-size={batch} \\
  --micro-batch-size=16 --zero-stage={stage} --tensor-model-parallel-size=1 --pipeline-model-parallel-size={pp} \\
  --weight-decay=0.1 --clip-grad=1.0 --seed=1234 --vocab-file=v.json --merge-file=m.txt --data-path=d/text \\
  --data-impl=mmap --split=949,50,1 --num-workers=2 --save={out} --load={out} --tensorboard-queue-size=1 \\
  --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard \\
  --tensorboard-dir=tb --log-interval=10 --eval-iters=10 --eval-interval=100 --save-interval=1000 \\
  --deepspeed-activation-checkpointing --checkpoint-activations --fp16 --use-flash-attn
"""
LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "length": 1024}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "length": 16}


def ds_config(stage: int, batch: int = 1024) -> dict[str, Any]:
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 10,
        "zero_optimization": {"stage": stage, "elastic_checkpoint": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 11,
        },
    }


@pytest.mark.parametrize(
    ("origin", "content", "file", "schedule"),
    [
        (
            "megatron_lm",
            "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 "
            "--micro-batch-size 1 --global-batch-size 64 --rampup-batch-size 16 16 5859 --train-iters 100 --lr 1e-4 "
            "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 20 --data-path x\n",
            "a.sh",
            {"name": "wsd", "shape": "minus_sqrt", "cooldown_steps": 20},
        ),
        (
            "torchtitan",
            {"model": {"name": "llama3", "flavor": "8B"}, "lr_scheduler": {"decay_ratio": 0.1, "decay_type": "sqrt"}},
            "a.json",
            {"name": "wsd", "cooldown_fraction": 0.1, "shape": "minus_sqrt"},
        ),
        (
            "transformers",
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 9}, "max_steps": 50,
             "learning_rate": 1e-4},
            "a.json",
            {"name": "wsd", "shape": "cosine", "cooldown_steps": 9},
        ),
    ],
)  # fmt: skip
def test_a_phase_of_constant_rate(
    tmp_path: Path, origin: str, content: Any, file: str, schedule: dict[str, Any]
) -> None:
    tree, notes, _ = migrated(tmp_path, origin, content, file)
    assert tree["run"]["lr_sched"] == schedule
    assert not re.search("lr_|decay_|rampup", notes.replace("weight_decay", ""))
    if origin == "megatron_lm":
        assert tree["run"]["batch_warmup"] == {"start": 16, "increment": 16, "samples": 5859}


@pytest.mark.parametrize(("gpus", "mp"), [(1, 1), (2, 1), (2, 2)])
def test_a_script_of_the_first_megatron(tmp_path: Path, gpus: int, mp: int) -> None:
    script = FIRST.format(**LARGE, gpus=gpus, mp=mp, out="out", more="")
    tree, notes, ranks = migrated(tmp_path, "megatron_lm", script, "a.sh")
    run, data = tree["run"], tree["datasets"]["data"]
    assert tree["model"] == {
        "arch": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_layer": 24,
        "n_head": 16,
        "n_embd": 1024,
        "dropout": 0.1,
    }
    assert (data["seq_length"], data["split"], data["path"]) == (1024, [400, 300, 300], "???")
    wanted = {"name": "megatron", "tensor_parallel": 2, "pipeline_parallel": 1} if mp == 2 else None
    assert (run.get("runner"), ranks) == (wanted, gpus if gpus > 1 else 1)
    assert (run["micro_batch_size"], run["max_iters"], run["output_dir"]) == (8, 600, "out")
    assert (run["init_lr"], run["lr_sched"], run["warmup_fraction"]) == (0.00015, "cosine_megatron_v1", 0.01)
    assert (run["weight_decay"], run["grad_norm_clip"], run["gradient_checkpointing"]) == (0.01, 1.0, "full")
    assert run["amp"] == {"dtype": "fp16"}  # whose scale begins at 2 ** 32 in both
    assert "unknown, and no key" not in notes
    assert "crosstrain prepare from the text of webtext" in notes


def test_the_line_of_the_first_megatron_has_its_slope(tmp_path: Path) -> None:
    """Its rate is lr (1 - (n - w) / D) after the warmup, up to step D - w."""
    from crosstrain.engine.build import make_schedule

    script = FIRST.format(**SMALL, gpus=1, mp=1, out="out", more="").replace("cosine", "linear")
    tree, _, _ = migrated(tmp_path, "megatron_lm", script, "a.sh")
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(complete(tree)))
    rate = make_schedule(load_config(tmp_path / "p.yaml", []), 600)
    for n in (6, 7, 100, 594):
        assert rate(n) == pytest.approx(0.00015 * (1 - (n - 6) / 600))


CORE = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "data_path": ["1", "a", "1", "b"],
}  # fmt: skip


@pytest.mark.parametrize(("content", "rounding"), [
    (FIRST.format(**SMALL, gpus=1, mp=1, out="out", more=""), "legacy"),
    (MODELARTS.format(**SMALL, gpus=2, out="out"), "legacy"),
    (DEEPSPEED.format(**SMALL, nodes=1, gpus=2, stage=1, pp=1, batch=32, tokens=10**5, samples=10**5, warmup=10**4,
                      out="out"), "legacy"),
    (json.dumps(CORE | {"zero_stage": 1, "split": "949,50,1"}), "legacy"),
    (json.dumps(CORE | {"split": "949,50,1"}), None),
    (json.dumps(CORE | {"data_path": "a", "use_distributed_optimizer": True, "bf16": True}), None),
])  # fmt: skip
def test_splits_are_rounded_as_the_scripts_program_does(tmp_path: Path, content: str, rounding: str | None) -> None:
    """Before Megatron Core the size of each split was rounded; Megatron-DeepSpeed still does so."""
    tree, _, _ = migrated(tmp_path, "megatron_lm", content, "a.json" if content.startswith("{") else "a.sh")
    data = tree["datasets"]["data"]
    parts = [part["dataset"] for part in data["parts"]] if "parts" in data else [data]
    assert [part.get("split_rounding") for part in parts] == [rounding] * len(parts)
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(complete(tree)))
    load_config(tmp_path / "p.yaml", [])


def test_a_file_of_deepspeed_beside_a_script_of_the_first_megatron(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_batch_size": 16,
                "gradient_accumulation_steps": 1,
                "steps_per_print": 1,
                "zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000},
                "gradient_clipping": 1.0,
                "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "loss_scale_window": 1000,
                    "hysteresis": 2,
                    "min_loss_scale": 1,
                },
                "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": False},
            }
        )
    )
    more = "--deepspeed --deepspeed_config ds.json --deepspeed-activation-checkpointing "
    script = FIRST.format(**LARGE, gpus=2, mp=1, out="out", more=more)
    tree, notes, _ = migrated(tmp_path, "megatron_lm", script, "a.sh")
    run = tree["run"]
    assert run["runner"] == {"name": "deepspeed", "stage": 2, "reduce_bucket_size": 50000000}
    assert run["amp"]["initial_scale"] == 2.0**16  # DeepSpeed's default, not Megatron's
    assert (run["micro_batch_size"], run.get("global_batch_size"), run["accum_grad_iters"]) == (8, None, 1)
    lost = [note for note in notes.splitlines() if note.startswith("not carried over")]
    assert [note.split(": ")[1] for note in lost] == ["load", "ds.json.activation_checkpointing.partition_activations"]


def test_the_script_of_modelarts(tmp_path: Path) -> None:
    script = MODELARTS.format(**LARGE, gpus=8, out="checkpoints/gpt2")
    tree, notes, ranks = migrated(tmp_path, "megatron_lm", script, "a.sh")
    run = tree["run"]
    assert (run["micro_batch_size"], run["global_batch_size"], ranks) == (4, 64, 8)
    assert (run["max_iters"], run["lr_decay_iters"], run["warmup_fraction"]) == (5000, 320000, 0.01)
    assert (run["lr_sched"], run["min_lr"], run["gradient_checkpointing"]) == ("cosine", 1e-5, "full")
    assert (run["eval_interval"], run["eval_iters"], run["save_interval"]) == (100, 10, 500)
    assert "runner" not in run
    assert "unknown, and no key" not in notes


@pytest.mark.parametrize(("size", "stage", "pp", "nodes", "gpus", "batch", "runner"), [
    ("125M", 0, 1, 1, 1, 256, None), ("1.3B", 2, 1, 1, 4, 512, "zero2"), ("1.3B", 1, 1, 1, 4, 512, "zero1"),
    ("13B", 1, 4, 2, 8, 1024, {"name": "megatron", "tensor_parallel": 1, "pipeline_parallel": 4,
                               "data_parallel_style": "zero1"}),
    ("13B", 3, 4, 2, 8, 1024, {"name": "megatron", "tensor_parallel": 1, "pipeline_parallel": 4,
                               "data_parallel_style": "fsdp"}),
])  # fmt: skip
@pytest.mark.parametrize("file", [True, False])
def test_scripts_of_megatron_deepspeed(
    tmp_path: Path, size: str, stage: int, pp: int, nodes: int, gpus: int, batch: int, runner: Any, file: bool
) -> None:
    tokens = {"125M": 2_500_000_000, "1.3B": 26_000_000_000, "13B": 260_000_000_000}[size]
    if file:
        (tmp_path / "ds.json").write_text(json.dumps(ds_config(stage, batch)))
    script = DEEPSPEED.format(
        **LARGE | {"length": 2048},
        nodes=nodes,
        gpus=gpus,
        stage=stage,
        pp=pp,
        batch=batch,
        tokens=tokens,
        samples=tokens // 1000,
        warmup=tokens // 100,
        out="out",
    )
    tree, notes, ranks = migrated(tmp_path, "megatron_lm", script, "a.sh")
    run, step = tree["run"], batch * 2048
    assert run["max_iters"] == math.ceil(tokens / step)  # the step that reaches them is the last one
    assert (run["warmup_steps"], run["lr_decay_iters"]) == (round(tokens / 100 / step), round(tokens / step))
    assert (run["lr_sched"], run["min_lr"], run["init_lr"]) == ("cosine", 1e-6, 1e-4)
    assert (run["micro_batch_size"], run["global_batch_size"], ranks) == (16, batch, nodes * gpus)
    assert run["gradient_checkpointing"] == "full"
    if file:
        found = run.get("runner")
        assert found == ({"name": "deepspeed", "stage": stage} if isinstance(runner, str) else runner)
        scale = {"initial_scale": 2.0**11, "window": 500, "hysteresis": 2, "min_scale": 1}
        assert run["amp"] == {"dtype": "fp16"} | scale
    else:
        assert run.get("runner") == runner
        assert "deepspeed_config: ds.json is not beside this file" in notes
    assert "unknown, and no key" not in notes
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(complete(tree)))
    load_config(tmp_path / "p.yaml", [])


def test_a_curriculum_of_megatron_deepspeed(tmp_path: Path) -> None:
    plan = {"total_curriculum_step": 60, "difficulty_step": 8}
    course = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 2048,
              "schedule_type": "fixed_linear", "schedule_config": plan}  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(ds_config(1) | {"curriculum_learning": course}))
    script = DEEPSPEED.format(
        **LARGE | {"length": 2048},
        nodes=1,
        gpus=8,
        stage=1,
        pp=1,
        batch=1024,
        tokens=10**9,
        samples=10**6,
        warmup=10**7,
        out="out",
    )
    script = script.replace("--deepspeed_config", "--curriculum-learning --deepspeed_config", 1)
    tree, notes, _ = migrated(tmp_path, "megatron_lm", script, "a.sh")
    assert "--curriculum-learning" in script
    assert tree["run"]["curriculum"] == {"start": 8, "steps": 60, "multiple_of": 8}
    assert "curriculum_learning: run.curriculum comes from the DeepSpeed file" in notes
    assert "curriculum_learning: set" not in notes
    assert "under a curriculum the first steps have fewer tokens" in notes


SMALL_RUNS = {
    "first": (FIRST.format(**SMALL, gpus=1, mp=1, out="{out}", more=""), 1),
    "first, tensor parallel": (FIRST.format(**SMALL, gpus=2, mp=2, out="{out}", more=""), 2),
    "modelarts": (MODELARTS.format(**SMALL, gpus=2, out="{out}"), 2),
    "megatron-deepspeed": (DEEPSPEED.format(
        **SMALL, nodes=1, gpus=2, stage=1, pp=1, batch=32, tokens=10**5, samples=10**5, warmup=10**4, out="{out}"), 2),
    "megatron-deepspeed, pipeline": (DEEPSPEED.format(
        **SMALL, nodes=1, gpus=2, stage=1, pp=2, batch=32, tokens=10**5, samples=10**5, warmup=10**4, out="{out}"), 2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_RUNS)
def test_small_versions_pass_a_dry_run_and_train(tmp_path: Path, workspace: Workspace, name: str) -> None:
    """Data is a small one in the script's place, on CPUs; two steps change the loss."""
    script, ranks = SMALL_RUNS[name]
    (tmp_path / "ds.json").write_text(json.dumps(ds_config(1, 32)))
    tree, _, _ = migrated(tmp_path, "megatron_lm", script.replace("{out}", str(tmp_path / "out")), "a.sh")
    data = workspace.config["datasets"]["tiny"]
    tree["datasets"] = {"tiny": data}
    tree["run"] |= {"device": "cpu", "num_workers": 0, "trackers": [], "log_interval": 1}
    for key in ("eval_interval", "eval_iters"):
        tree["run"].pop(key, None)
    tree["model"]["n_positions"] = max(tree["model"]["n_positions"], data.get("seq_length", 16))
    (project := tmp_path / "p.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", "--cfg-path", str(project), "--dry-run", "--world-size", str(ranks)]) == 0
    short = ["run.max_iters=2", "run.warmup_fraction=null", "run.warmup_steps=1", "run.lr_decay_iters=null"]
    command = [sys.executable, str(ROOT / "train.py"), "--cfg-path", str(project), "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, "--options", *short], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if "loss" in row]) == 2


# --- Experts.

SPARSE = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "num_experts": 8, "swiglu": True,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "disable_bias_linear": True, "hidden_dropout": 0,
    "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize(("freq", "dense"), [
    (1, []), (2, [1, 3]), ("[0]*1+[1]*3", [0]), ("([0]+[1])*2", [0, 2]), ("([1]*1+[0]*1)*2", [1, 3]),
    ([1, 0, 0, 1], [1, 2]), ("[0,1]*2", [0, 2]), ("[1]*4", []), ("[0]*9", None), ("[2]*4", None), ("os.system", None),
    ("[1]*99999999999", None), ("([1]*999)*999999999", None),
])  # fmt: skip
def test_layers_with_experts(tmp_path: Path, freq: Any, dense: list[int] | None) -> None:
    """The lists are what Python makes of Megatron-LM's expressions."""
    tree, notes, _ = migrated(tmp_path, "megatron_lm", SPARSE | {"qk_layernorm": True, "moe_layer_freq": freq})
    config = tree["model"]["config"]
    assert (config["model_type"], config["num_experts_per_tok"]) == ("qwen3_moe", 2)
    assert ("moe_layer_freq: qwen3_moe has experts in different layers" in notes) == (dense is None)
    if isinstance(freq, str) and dense is not None:
        assert [layer for layer, bit in enumerate(eval(freq)) if not bit] == dense
    assert config["mlp_only_layers"] == (dense or [])


def test_latent_attention_without_a_rank_of_queries(tmp_path: Path) -> None:
    given = SPARSE | {"multi_latent_attention": True, "moe_layer_freq": "[0]*1+[1]*3"}
    tree, _, _ = migrated(tmp_path, "megatron_lm", given | {"moe_router_score_function": "sigmoid"})
    config = tree["model"]["config"]
    assert config["q_lora_rank"] is None
    assert config["first_k_dense_replace"] == 1
    kind = registry.get("model", tree["model"].pop("arch"))
    with parameters_on_meta():
        names = [name for name, _ in kind(kind.Options(**tree["model"])).named_parameters()]
    assert any("q_proj" in name for name in names)
    assert not any("q_a_proj" in name for name in names)


def test_keys_that_resemble_others() -> None:
    assert "model.router_loss_coef" in ForeignKeys().of_key("moe_loss_coeff")
    assert "run.lr_decay_iters: tokens" in ForeignKeys().of_key("lr_decay_tokens")
    assert "--nnodes" in ForeignKeys().of_key("deepspeed_hostfile")
    assert "--nnodes" in ForeignKeys().of_key("deepspeed_multinode_launcher")
    assert "leaf_module" in ForeignKeys().of_key("deepspeed_moe_layer_cls_names")


@pytest.mark.parametrize(
    ("given", "wanted"), [({"profile": True, "profile_ranks": 0}, [0]), ({"profile_ranks": 0}, None)]
)
def test_the_ranks_of_a_profile(tmp_path: Path, given: dict[str, Any], wanted: list[int] | None) -> None:
    tree, notes, _ = migrated(tmp_path, "megatron_lm", {"num_layers": 2, "train_iters": 20} | given)
    assert tree["run"].get("profile", {}).get("ranks") == wanted
    assert ("profile_ranks" in notes) == (wanted is None)


def test_settings_of_offloading_that_have_no_counterpart(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3}}
    tree, notes, _ = migrated(tmp_path, "deepspeed", {"zero_optimization": zero})
    assert tree["run"]["runner"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert re.search(r"not carried over: zero_optimization.offload_optimizer.ratio: the whole optimizer state", notes)


# --- The parts of a DeepSpeed configuration that a tutorial explains one by one.

ADAM = {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0,
                                   "torch_adam": False, "adam_w_mode": True}}  # fmt: skip
NVME = {
    "offload_optimizer": {"device": "nvme", "nvme_path": "/dev/shm", "buffer_count": 4, "fast_init": False},
    "offload_param": {
        "device": "nvme",
        "nvme_path": "/dev/shm",
        "buffer_count": 5,
        "buffer_size": 1e8,
        "max_in_cpu": 1e9,
    },
}
STAGES = {
    0: {"stage": 0}, 1: {"stage": 1},
    2: {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 3e8, "overlap_comm": True,
        "reduce_scatter": True, "reduce_bucket_size": 3e8, "contiguous_gradients": True},
    3: {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
        "sub_group_size": 1e9, "reduce_bucket_size": 1e6, "stage3_prefetch_bucket_size": 4e6,
        "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
    "nvme": {"stage": 3, **NVME},
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_configuration_of_each_stage(tmp_path: Path, stage: Any) -> None:
    plan = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 5}}
    tree, notes, _ = migrated(
        tmp_path,
        "deepspeed",
        {
            "train_batch_size": 16,
            "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": ADAM,
            "scheduler": plan,
            "gradient_clipping": 1.0,
            "steps_per_print": 1,
            "wall_clock_breakdown": False,
            "dump_state": False,
            "zero_optimization": STAGES[stage],
            "fp16": {
                "enabled": False,
                "auto_cast": False,
                "loss_scale": 0,
                "initial_scale_power": 16,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "consecutive_hysteresis": False,
                "min_loss_scale": 1,
            },
            "bf16": {"enabled": True},
            "tensorboard": {"enabled": True, "output_path": "log/", "job_name": "2023-12-15"},
        },
    )
    run = tree["run"]
    assert (run["global_batch_size"], run["micro_batch_size"], run["accum_grad_iters"]) == (16, 8, 1)
    assert run["optimizer"] == {"name": "adamw", "betas": [0.9, 0.99], "eps": 1e-7}
    assert (run["init_lr"], run["weight_decay"], run["lr_sched"], run["warmup_steps"]) == (1e-4, 0, "constant", 5)
    assert (run["amp"], run["grad_norm_clip"], run["log_interval"]) == ("bf16", 1.0, 1)
    dropped = {"stage3_gather_16bit_weights_on_model_save"}
    wanted = {key: value for key, value in STAGES[stage].items() if key not in dropped}
    assert run["runner"] == {"name": "deepspeed"} | wanted
    assert "unknown, and no key" not in notes
    assert "warmup_type" in notes  # DeepSpeed's default is logarithmic
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(complete(tree)))
    load_config(tmp_path / "p.yaml", [])


# --- LLaMA-Factory's descriptions of data.

ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


@pytest.mark.parametrize(("entry", "stage", "noted"), [
    ({"columns": ALPACA}, "sft", []),
    ({"columns": {"messages": "messages", "tools": "tools"}, "formatting": "sharegpt", "tags": OPENAI}, "sft", []),
    ({"columns": ALPACA | {"system": "sys"}}, "sft", ["columns.system: rename sys to system"]),
    ({"columns": ALPACA | {"response": "input"}}, "sft", ["columns.response: rename input to output"]),
    ({"columns": {"prompt": "instruction", "response": "answer"}}, "sft", [".columns: rename instruction+answer"]),
    ({"columns": {"prompt": "q", "response": "a"}}, "sft", ["columns.prompt: rename q", "columns.response: rename a"]),
    ({"columns": {"messages": "chat", "videos": "clips", "audios": "sounds"}, "formatting": "sharegpt"}, "sft",
     ["columns.messages: rename chat to conversations", "columns.videos: videos and sounds", "columns.audios: videos"]),
    ({"columns": ALPACA | {"images": "images"}}, "sft", ["columns.images: the dataset chat contains only text"]),
    ({"columns": {"messages": "conversations"}, "formatting": "sharegpt", "tags": {"role_tag": "speaker"}}, "sft",
     ["tags.role_tag: rename speaker to from", ".tags: rename the keys of a turn"]),
    ({"columns": {"messages": "conversations"}, "formatting": "sharegpt", "tags": {"user_tag": "asker"}}, "sft",
     ["tags.user_tag: rename asker to human"]),
    ({"columns": {"messages": "conversations"}, "formatting": "sharegpt", "tags": {"role_tag": "role"}}, "sft",
     [".tags: rename the keys of a turn"]),
    ({"columns": {"prompt": "prompt", "chosen": "good", "rejected": "bad"}, "ranking": True}, "dpo",
     ["columns.chosen: rename good to chosen", "columns.rejected: rename bad to rejected"]),
    ({"columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}, "ranking": True}, "dpo", []),
    ({"columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}}, "dpo", ["ranking: stage dpo has"]),
    ({"columns": {"prompt": "instruction", "response": "output", "kto_tag": "label"}}, "kto", []),
    ({"columns": {"prompt": "instruction", "response": "output", "kto_tag": "ok"}}, "kto", ["kto_tag: rename ok to"]),
    ({"columns": ALPACA, "num_samples": 100}, "sft", ["num_samples: all rows of the file are used"]),
    ({"columns": ALPACA, "split": "validation"}, "sft", ["split: all rows"]),
    ({"columns": {"prompt": "text"}}, "pt", []),
    ({"columns": {"prompt": "instruction", "unheard": "x"}}, "sft", ["columns.unheard: unknown"]),
])  # fmt: skip
def test_columns_and_tags_of_llama_factory(tmp_path: Path, entry: dict[str, Any], stage: str, noted: list[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.json").write_text("[]")
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.json"} | entry}))
    settings = {"dataset": "mine", "stage": stage, "model_name_or_path": "m"}
    _, notes, _ = migrated(tmp_path, "llama_factory", settings)
    lines = [line for line in notes.splitlines() if "dataset_info.json" in line and line.startswith("not carried over")]
    assert len(lines) <= len(noted)
    assert all(any(text in line for line in lines) for text in noted), (noted, lines)


def test_data_of_the_hub_and_of_scripts_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    info = {"a": {"hf_hub_url": "org/a"}, "b": {"script_url": "b"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    tree, notes, _ = migrated(tmp_path, "llama_factory", {"dataset": "a,b", "model_name_or_path": "m"})
    assert tree["datasets"]["data"]["path"] == "???"
    assert "a.hf_hub_url, dataset_info.json: b.script_url: write its rows into a file" in notes


# --- LAVIS.


@pytest.mark.parametrize(("model", "config", "known"), [
    ({"model_type": "qwen7b_chat", "llm_model": "ckpt"}, None, False),
    ({"model_type": "x", "llm_model": "Qwen/Qwen-7B-Chat"}, None, False),
    ({"model_type": "x", "llm_model": "ckpt/Qwen14B-chat"}, None, False),
    ({"model_type": "x", "llm_model": "Qwen/Qwen-1_8B"}, None, False),
    ({"model_type": "x", "llm_model": "Qwen/Qwen-VL"}, None, False),
    ({"llm_model": "folder"}, "qwen", False),
    ({"model_type": "qwen7b", "llm_model": "folder"}, "qwen2", True),
    ({"model_type": "x", "llm_model": "Qwen/Qwen2.5-7B-Instruct"}, None, True),
    ({"model_type": "x", "llm_model": "Qwen/Qwen1.5-7B"}, None, True),
    ({"model_type": "x", "llm_model": "Qwen/Qwen3-14B"}, None, True),
])  # fmt: skip
def test_the_first_generation_of_qwen(tmp_path: Path, model: dict[str, Any], config: str | None, known: bool) -> None:
    if config:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "config.json").write_text(json.dumps({"model_type": config}))
    tree, notes, _ = migrated(tmp_path, "lavis", {"model": {"arch": "minigpt4qwen"} | model, "run": {"max_epoch": 1}})
    assert tree["model"]["language_model"]["model"]["pretrained"] == (model["llm_model"] if known else "???")
    assert ("the first generation, is not in transformers" in notes) == (not known)


@pytest.mark.parametrize(("arch", "given", "wanted"), [
    ("blip2_opt", {"max_txt_len": 32}, 64), ("blip2_opt", {}, 64),
    ("blip2_opt", {"max_txt_len": 40, "num_query_token": 8}, 48),
    ("minigpt4qwen", {"max_txt_len": 256}, 256), ("minigpt4qwen", {}, None),
])  # fmt: skip
def test_the_length_of_a_text_with_an_image(
    tmp_path: Path, arch: str, given: dict[str, Any], wanted: int | None
) -> None:
    file = {"model": {"arch": arch} | given, "datasets": {"d": {}}, "run": {"max_epoch": 1}}
    tree, _, _ = migrated(tmp_path, "lavis", file)
    assert tree["datasets"]["d"].get("max_length") == wanted


@pytest.mark.parametrize(
    "arch", ["albef_vqa", "albef_pretrain", "blip_caption", "blip_vqa", "clip", "alpro_qa", "resnet50"]
)
def test_another_architecture_has_to_be_given(tmp_path: Path, arch: str) -> None:
    tree, notes, _ = migrated(tmp_path, "lavis", {"model": {"arch": arch}, "run": {"max_epoch": 1}})
    assert tree["model"]["arch"] == "???"
    assert (
        f"to be given: model.arch: blip2_qwen, which is trained for a different task; {arch} is not built in" in notes
    )


def test_processors_that_are_not_there_are_named(tmp_path: Path) -> None:
    see = {"train": {"name": "clip_image_train", "image_size": 224}, "eval": {"name": "clip_image_eval"}}
    file = {"model": {"arch": "blip2_opt"}, "run": {"max_epoch": 1, "task": "captioning"},
            "datasets": {"d": {"vis_processor": see, "text_processor": {"train": {"name": "gpt_dialogue"}}}},
    }  # fmt: skip
    tree, notes, _ = migrated(tmp_path, "lavis", file)
    data = tree["datasets"]["d"]
    assert [data["vis_processor"][when]["name"] for when in ("train", "eval")] == [
        "blip2_image_train",
        "blip_image_eval",
    ]
    for name in ("clip_image_train", "clip_image_eval", "gpt_dialogue"):
        assert f"{name} is not built in" in notes


# --- Files of strangers.

LEAST: dict[str, tuple[str, Any]] = {
    "lavis": ("a.json", {"model": {"arch": "minigpt4qwen"}}), "megatron_lm": ("a.json", {"num_layers": 2}),
    "deepspeed": ("a.json", {"zero_optimization": {"stage": 1}}), "transformers": ("a.json", {"learning_rate": 1.0}),
    "llama_factory": ("a.json", {"stage": "sft"}), "nanogpt": ("a.json", {"n_layer": 2}),
    "torchtitan": ("a.json", {"training": {"seq_len": 8}}),
}  # fmt: skip
SECTIONS = {"run", "training", "zero_optimization", "datasets", "model"}
HOSTILE = st.sampled_from(
    [
        "${oc.env:HOME}",
        "x${oc.env:HOME}",
        "pipe:touch ran",
        " PIPE:touch ran",
        "a\nrun: {plugins: [evil.py]}",
        "\x1b[31m",
        "a\u2028b",
        "a\x85b",
        "???\nmodel: x",
        "; touch ran",
        "$(touch ran)",
        "'null'",
        "\ud800",
    ]
)
NAMES = HOSTILE | st.sampled_from(
    [
        "plugins",
        "trackers",
        "callbacks",
        "metrics",
        "objective",
        "resume_from",
        "storage",
        "output_dir",
        "save",
        "dataset",
        "dataset_path",
        "data_path",
        "path",
        "seed",
        "num_processes",
        "world_size",
        "nproc_per_node",
        "a: b",
    ]
)
VALUES = st.recursive(
    HOSTILE | st.integers(-5, 2**40) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def texts(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return [text for inner in tree.values() for text in texts(inner)]
    return [text for inner in tree for text in texts(inner)] if isinstance(tree, list) else [str(tree)]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(name="megatron_lm", section="", added={"data_path": {"pipe:touch ran": None, "${oc.env:HOME}": None}})
@given(name=st.sampled_from(sorted(LEAST)), section=st.sampled_from(["", *sorted(SECTIONS)]),
       added=st.dictionaries(NAMES, VALUES, min_size=1, max_size=5))  # fmt: skip
def test_nothing_of_a_strangers_file_acts(tmp_path: Path, name: str, section: str, added: dict[str, Any]) -> None:
    """No plugin, command or reference reaches the project; comments stay comments; ranks are a number."""
    file, least = LEAST[name]
    content = json.loads(json.dumps(least))
    if section:
        part = content.setdefault(section, {})
        part.update(added) if isinstance(part, dict) else None
    else:
        content |= added
    (path := tmp_path / file).write_text(json.dumps(content))
    try:
        text, notes, ranks = migrate(path, origins()[name])
    except ConfigError:  # a value that cannot be understood, or settings of a different program
        return
    text.encode()
    project = yaml.safe_load(text)
    assert "plugins" not in project["run"]
    for said in texts(project):
        assert not said.strip().lower().startswith("pipe:")
        assert "${" not in said or said in (
            "${model.language_model.model.pretrained}",
            "${model.qformer.num_query_tokens}",
        )
    comments, _, _ = text.partition("\nmodel:")
    assert all(line.startswith("# ") for line in comments.splitlines() if line)
    assert len(comments.splitlines()) <= len(notes) + 1
    assert all(note.isprintable() for note in notes)
    assert ranks is None or type(ranks) is int


@pytest.mark.parametrize("name", LEAST)
def test_our_own_keys_in_a_strangers_file(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, least = LEAST[name]
    own = {"plugins": ["evil.py"], "sample_prompts": ["hello"], "resume_from": "there", "freeze": ["a.*"]}
    tree, notes, _ = migrated(tmp_path, name, least | own, file)
    assert "plugins" not in tree["run"]
    assert "not carried over: plugins: a migrated file cannot load code" in notes
    assert {key: tree["run"][key] for key in own if key != "plugins"} == {
        k: v for k, v in own.items() if k != "plugins"
    }
    assert "carried over: sample_prompts, resume_from, freeze: " in notes
    assert main(["migrate", str(tmp_path / file), "--from", name, "--output", str(tmp_path / "p.yaml")]) == 0
    assert "evil.py" not in capsys.readouterr().out.splitlines()[-1]


def test_the_next_command_says_what_was_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (more, said) in enumerate(((", unheard_of: 3", True), ("", False))):
        (tmp_path / "a.yaml").write_text("{out_dir: o, batch_size: 4" + more + "}")
        assert (
            main(["migrate", str(tmp_path / "a.yaml"), "--from", "nanogpt", "--output", str(tmp_path / f"{number}")])
            == 0
        )
        last = capsys.readouterr().out.splitlines()[-1]
        assert ("look up the unknown settings, which the project lacks" in last) == said
        assert last.startswith("next: fill in the values that are ??? in ")


def test_a_file_of_thousands_of_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at most 2000 settings, got 2001"):
        migrated(tmp_path, "nanogpt", {f"key_{i}": 1 for i in range(2001)})


MEGATRON = (
    "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --save o "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 5 --data-path x "
)
LLAMA = f"{MEGATRON} --position-embedding-type rope --swiglu "
TRAINER = {"output_dir": "o", "model_name_or_path": "gpt2"}
ACCELERATE = "accelerate launch {} --mixed_precision bf16 train.py --model_name_or_path gpt2 --output_dir o\n"


@pytest.mark.parametrize(
    ("origin", "file", "content", "place", "value"),
    [
        # A file that names no data is not data itself.
        ("transformers", "a.json", TRAINER, "datasets.data.prepare.input", "???"),
        # accelerate's options have the same meaning before the script as in its configuration.
        ("transformers", "a.sh", ACCELERATE.format("--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu"),
         "run.runner", {"name": "deepspeed", "stage": 3, "offload_optimizer": {"device": "cpu"}}),
        ("transformers", "a.sh", ACCELERATE.format("--use_fsdp"), "run.runner", {"name": "fsdp"}),
        ("transformers", "a.sh", ACCELERATE.format(""), "run.amp", "bf16"),
        # TRL's trainers
        ("transformers", "a.py", "ORPOConfig(output_dir='o')", "run.objective", {"name": "orpo", "beta": 0.1}),
        ("transformers", "a.py", "RewardConfig(output_dir='o')", "run.objective", "reward_model"),
        ("transformers", "a.py", "RewardConfig(output_dir='o')", "run.init_lr", 1e-4),
        ("transformers", "a.py", "GRPOConfig('o', beta=0.04, num_generations=4, loss_type='dr_grpo')", "run.objective",
         {"name": "dr_grpo", "rewards": "???", "completions": 4, "max_new_tokens": 256, "kl": 0.04}),
        ("transformers", "a.py", "GRPOConfig('o')", "datasets.data.name", "prompts"),
        # settings of Python scripts
        ("nanogpt", "a.py", "batch_size: int = 32", "run.micro_batch_size", 32),
        ("nanogpt", "a.py", "beta1, beta2 = 0.8, 0.99", "run.optimizer.betas", [0.8, 0.99]),
        ("nanogpt", "a.py", "learning_rate = min_lr = 1e-3", "run.min_lr", 1e-3),
        ("nanogpt", "a.py", "max_iters = 100\nmax_iters *= 5", "run.max_iters", 500),
        ("transformers", "a.py", "a = TrainingArguments('o')\na.max_steps = 7", "run.max_iters", 7),
        ("transformers", "a.py", "a = TrainingArguments('o', max_steps=5)\na.max_steps = 7", "run.max_iters", 7),
        ("transformers", "a.py", "TrainingArguments('o', max_steps=n)", "run.max_iters", "???"),
        ("transformers", "a.py", "TrainingArguments('o', seed=1)\nTrainingArguments('o', seed=2)", "run.seed", "???"),
        # defaults and zeros of the origin
        ("megatron_lm", "a.sh", f"{LLAMA} --group-query-attention", "model.config.num_key_value_heads", 1),
        ("megatron_lm", "a.sh", f"{LLAMA} --num-query-groups 2", "model.config.num_key_value_heads", 4),
        ("megatron_lm", "a.sh", f"{LLAMA} --qk-layernorm", "model.config.head_dim", 16),
        ("megatron_lm", "a.sh", f"{MEGATRON} --optimizer sgd --sgd-momentum 0.0", "run.optimizer.momentum", 0),
        ("megatron_lm", "a.sh", f"{MEGATRON} --optimizer muon", "run.optimizer.name", "muon"),
        ("torchtitan", "a.json", {"optimizer": {"name": "Adam"}}, "run.optimizer.decoupled", False),
        ("torchtitan", "a.json", {"lr_scheduler": {"decay_ratio": 0.0}}, "run.lr_sched", "constant"),
        ("transformers", "a.json", TRAINER | {"fp16": True}, "run.amp.initial_scale", 2**16),
        ("transformers", "a.py",
         "SFTConfig('o', lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1})",
         "run.min_lr", pytest.approx(2e-6)),
    ],
)  # fmt: skip
def test_what_the_origin_would_do(tmp_path: Path, origin: str, file: str, content: Any, place: str, value: Any) -> None:
    assert at(migrated(tmp_path, origin, content, file)[0], place) == value


@pytest.mark.parametrize(
    ("origin", "file", "content", "noted"),
    [
        ("megatron_lm", "a.sh", f"{MEGATRON} --position-embedding-type none", "position_embedding_type"),
        ("megatron_lm", "a.sh", f"{MEGATRON} --group-query-attention", "group_query_attention"),
        ("transformers", "a.json", TRAINER | {"optim": "schedule_free_adamw"}, "optim"),
        ("transformers", "a.json", TRAINER | {"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ("transformers", "a.json", TRAINER | {"beta": 0.1, "loss_type": "robust", "label_smoothing": 0.2}, "loss_type"),
        ("transformers", "a.json",
         TRAINER | {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1.5}},
         "lr_scheduler_kwargs.num_cycles"),
        ("transformers", "a.py", "TrainingArguments('o', **common)", "**common"),
        ("transformers", "a.py", "DPOConfig('o')", "disable_dropout"),
        ("deepspeed", "a.json", {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "bias_correction": False}}},
         "optimizer.params.bias_correction"),
    ],
)  # fmt: skip
def test_a_difference_from_the_origin_is_named(
    tmp_path: Path, origin: str, file: str, content: Any, noted: str
) -> None:
    notes = migrated(tmp_path, origin, content, file)[1]
    assert f"not carried over: {noted}: " in notes


def test_small_first_batches_make_more_steps(tmp_path: Path) -> None:
    # A tenth of a percent of GPT-3's training with Megatron-LM's options.
    start, growth, ramp, batch, total = 16, 16, 58_593, 1536, 1_464_843
    script = MEGATRON.replace("--global-batch-size 8 --train-iters 5", f"--global-batch-size {batch}")
    samples = {"train": total, "lr-warmup": 1_831, "lr-decay": 1_269_530}
    options = " ".join(f"--{name}-samples {count}" for name, count in samples.items())
    run = migrated(tmp_path, "megatron_lm", f"{script} --rampup-batch-size {start} {growth} {ramp} {options}", "a.sh")[
        0
    ]["run"]
    wanted = []
    for end in samples.values():
        seen = steps = 0
        while seen < end:
            grown = start + growth * (seen * ((batch - start) // growth) // ramp)
            seen, steps = seen + min(grown, batch), steps + 1
        wanted.append(steps)
    found = [run["max_iters"], run["warmup_steps"], run["lr_decay_iters"]]
    assert found == pytest.approx(wanted, abs=1)  # the remainder of the last step is left out
