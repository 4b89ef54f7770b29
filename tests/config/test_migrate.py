"""Configurations of other programs become projects, or named gaps; nothing in them is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml
from crosstrain_plugins.builtin.commands.migrate.foreign_files import read_foreign
from crosstrain_plugins.builtin.commands.migrate.foreign_keys import origins
from crosstrain_plugins.builtin.commands.migrate.migration import looks_like, migrate

from conftest import ENVIRONMENT, ROOT, Workspace
from crosstrain.cli.main import main
from crosstrain.config.load import Config, load_config
from crosstrain.config.registry import registry
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.utils.errors import ConfigError
from fixtures_foreign import FOREIGN


def migrated(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """Write a configuration and its companions, and return its project: the file, and what is in it."""
    program, file, text = FOREIGN[name]
    for _, companion, other in FOREIGN.values():
        (folder / companion).write_text(other)
    (folder / file).write_text(text)
    project = folder / f"{name}.project.yaml"
    assert main(["migrate", str(folder / file), "--from", program, "--output", str(project)]) == 0
    return project, yaml.safe_load(project.read_text())


def to_give(tree: Any, key: str = "") -> list[str]:
    if isinstance(tree, dict):
        return [found for name, inner in tree.items() for found in to_give(inner, f"{key}.{name}" if key else name)]
    return [key] if tree == "???" else []


def loaded(project: Path, tree: dict[str, Any]) -> Config:
    values = {"size": "512", "split": "[9,1]", "arch": "blip2_qwen", "lr": "0.1"}
    return load_config(project, [f"{key}={values.get(re.split('[._]', key)[-1], 'given')}" for key in to_give(tree)])


@pytest.mark.parametrize("name", FOREIGN)
def test_a_public_configuration_becomes_a_project(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every key of the project is right, and what has yet to be given is named with a reason."""
    project, tree = migrated(tmp_path, name)
    said = capsys.readouterr().out
    loaded(project, tree)
    assert all(re.search(rf"to be given: .*\b{re.escape(key)}[,:] ", said) for key in to_give(tree))
    assert "unknown, and no key" not in said
    assert "Error" not in said


def test_what_lavis_says_is_what_the_project_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, tree = migrated(tmp_path, "minigpt4qwen_zero2")
    config = loaded(project, tree)
    run = tree["run"]
    assert (run["micro_batch_size"], run["accum_grad_iters"], run["max_epoch"]) == (2, 16, 10)
    assert run["runner"]["stage"] == 2
    assert run["runner"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert run["optimizer"] == {"name": "adamw", "betas": [0.9, 0.99], "eps": 1e-7}
    assert (run["amp"], run["gradient_checkpointing"]) == ("bf16", "full")
    assert tree["model"]["vision"]["freeze"] is tree["model"]["qformer"]["freeze"] is True
    (label,) = config.datasets  # two side by side are one mixture, in proportion to their sizes
    assert label == "minigpt4_instruction+llava_instruction"
    parts = config.datasets[label].options.parts
    assert [part.ratio for part in parts] == [None, None]
    assert parts[0].dataset.options.vis_processor.train.name == "image_train"
    assert parts[0].dataset.options.vis_processor.train.options.image_size == 224
    said = capsys.readouterr().out
    assert "not carried over: model.model_type: Qwen-7B-Chat, the first generation, is not in transformers" in said
    assert "not needed here: run.distributed: --nproc-per-node sets the number of processes" in said


def test_files_and_precision_of_lavis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # LAVIS's paths are relative to where it is started
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text('{"model_type": "qwen2"}')
    stored = {"train": ["a.json", "b.json"], "val": "v.json", "test": ["t.json"]}
    build = {"annotations": {split: {"storage": file, "url": "http://x"} for split, file in stored.items()}}
    model = {"arch": "minigpt4qwen", "model_type": "qwen7b_chat", "llm_model": "qwen", "load_finetuned": True}
    settings = {
        "model": model | {"finetuned": "stage1/model.pth"},
        "datasets": {"mine": {"build_info": build | {"images": {"storage": "pictures"}}}},
        "run": {
            "autocast_dtype": "bfloat16", "lr_sched": "linear_warmup_step_lr", "resume_ckpt_path": "old.pth",
            "use_deepspeed": True, "deepspeed_config": "ds.json", "valid_splits": ["val"],
        },
    }  # fmt: skip
    tree, notes, _ = lost(tmp_path, "lavis", settings)
    mine, run = tree["datasets"]["mine"], tree["run"]
    assert (mine["annotations"], mine["val"], mine["test"]) == ("a.json", "v.json", "t.json")
    assert tree["model"]["language_model"]["model"] == {"name": "qwen", "pretrained": "qwen"}
    assert tree["model"]["pretrained"] == "???"  # a run, in place of a .pth
    assert (run["amp"], run["runner"], run["lr_sched"]) == ("bf16", "zero2", "linear_warmup_cosine_lr")
    assert "resume_from" not in run
    said = "\n".join(notes)
    for key in (
        "run.lr_sched",
        "run.resume_ckpt_path",
        "run.deepspeed_config",
        "run.valid_splits",
        "datasets.mine.build_info.annotations.train.storage",
        "datasets.mine.build_info.annotations.val.url",
    ):
        assert re.search(rf"^not carried over: (\S+, )*{re.escape(key)}[:,]", said, re.MULTILINE), key
    assert "unknown, and no key" not in said
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    settings["run"] |= {"weight_decay": 0.03, "grad_norm_clip": 1.0}
    settings["datasets"]["other"] = {"sample_ratio": 3}
    tree, notes, _ = lost(tmp_path, "lavis", settings)
    assert tree["run"]["runner"]["stage"] == 3
    assert [tree["datasets"][name]["sample_ratio"] for name in ("mine", "other")] == [1, 3]
    # DeepSpeed's optimizer has its own decay; without one it is given LAVIS's. Its clipping is its own.
    assert (tree["run"]["weight_decay"], tree["run"]["grad_norm_clip"]) == (0.03, 0)
    assert [n.split(": ")[1] for n in notes if "deepspeed_config" in n and "carried" in n] == ["run.grad_norm_clip"]
    settings["run"] |= {"use_deepspeed": False, "deepspeed_config": {"zero_optimization": {"stage": 3}}}
    tree, notes, _ = lost(tmp_path, "lavis", settings)
    assert tree["run"]["runner"] == "ddp"
    assert "not needed here: deepspeed_config: run.use_deepspeed is false" in notes


def test_a_script_that_trains_on_text_becomes_a_project_that_does(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "a.json").write_text('{"zero_optimization": {"stage": 2}}')
    script = tmp_path / "train.py"
    script.write_text(f"""
data = load_dataset("text", data_files={{"train": "{tmp_path}/texts/*.txt"}})
model = AutoModelForCausalLM.from_pretrained("{tmp_path}")
args = TrainingArguments("out", deepspeed="a.json", ddp_find_unused_parameters=False, max_steps=5)
Trainer(model, args, train_dataset=data["train"], data_collator=DataCollatorForLanguageModeling(tok, mlm=False))
""")
    assert looks_like(script) is origins()["transformers"]
    text, notes, _ = migrate(script, origins()["transformers"])
    tree = yaml.safe_load(text)
    assert tree["run"]["runner"] == {"name": "deepspeed", "stage": 2}
    assert any("ddp_find_unused_parameters: run.runner is deepspeed, which has no" in note for note in notes)
    data = tree["datasets"]["data"]
    assert (data["name"], data["prepare"]["input"], data["seq_length"]) == ("text", f"{tmp_path}/texts", "???")
    (tmp_path / "project.yaml").write_text(text.replace("???", "16"))
    assert looks_like(tmp_path / "project.yaml") is None


def test_a_shell_script_is_read_as_the_shell_would(tmp_path: Path) -> None:
    tree = migrated(tmp_path, "megatron_llama3")[1]
    assert tree["run"]["runner"] == {
        "name": "megatron",
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "sequence_parallel": True,
        "data_parallel_style": "zero1",
    }
    assert tree["run"]["output_dir"] == "checkpoints/llama3_8b"  # ${1:-"..."}
    assert tree["run"]["max_iters"] == 1953125000 // 128
    assert tree["run"]["warmup_steps"] == 3906252 // 128
    assert tree["run"]["collective_timeout"] == 3600
    assert tree["model"]["config"]["num_key_value_heads"] == 8
    assert tree["datasets"]["data"]["split"] == [99.0, 1.0, 0.0]
    gpt3 = migrated(tmp_path, "megatron_gpt3")[1]
    assert gpt3["run"]["output_dir"] == "???"  # $1
    assert gpt3["model"]["n_embd"] == 12288


def test_arithmetic_of_batches(tmp_path: Path) -> None:
    run = migrated(tmp_path, "nanogpt")[1]["run"]
    assert (run["micro_batch_size"], run["global_batch_size"]) == (12, 12 * 5 * 8)  # nanoGPT's is of all ranks
    assert run["lr_decay_iters"] == run["max_iters"] == 600000
    assert run["trackers"] == ["jsonl", {"name": "wandb", "project": "owt", "run_name": "gpt2-124M"}]


def test_a_file_beside_the_configuration_says_stage_optimizer_and_schedule(tmp_path: Path) -> None:
    run = migrated(tmp_path, "trainer")[1]["run"]
    assert run["runner"]["stage"] == 3
    assert (run["optimizer"]["betas"], run["init_lr"], run["weight_decay"]) == ([0.9, 0.95], 1e-4, 0.1)
    assert (run["lr_sched"], run["warmup_steps"], run["lr_decay_iters"]) == ("linear", 100, 2000)
    assert "warmup_fraction" not in run
    assert migrated(tmp_path, "trl_sft")[1]["model"]["adapter"] == {
        "name": "lora",
        "rank": 32,
        "alpha": 16,
        "dropout": 0.05,
    }


def test_arithmetic_of_a_shell_has_parentheses(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        """
        TP=2; PP=2
        GBS=$(( ${NT:-8} / (TP*PP) ))
        python pretrain_gpt.py --global-batch-size $GBS --seq-length $(( ((TP + 2) * (PP+1)) / 2 )) --seed $(cat a b) \\
            --lr $((1 + RATE))
        """.replace("; ", "\n")
    )
    tree = read_foreign(tmp_path / "a.sh")
    assert tree.pop("???").keys() == {"seed", "lr"}
    assert tree == {"global_batch_size": 2, "seq_length": 6, "seed": "???", "lr": "???"}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.py", "out_dir = __import__('os').system('touch ran')\nx = open('ran', 'w')\n_ = [open('ran', 'w')]"),
        ("a.py", "x = 'a'.join(['b'])\ny = 9**9**9**9\nz = (lambda: open('ran', 'w'))()"),
        ("a.sh", "X=$(touch ran)\nY=`touch ran`\npython a.py --lr $X --save $Y --seed $((touch ran)) $(touch ran)"),
        ("a.yaml", "run: !!python/object/apply:os.system ['touch ran']"),
    ],
)
def test_nothing_is_run(tmp_path: Path, file: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text)
    main(["migrate", file, "--from", "nanogpt"])
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("a.json", "{", "a.json: cannot be read"),
        ("a.toml", "a = ", "a.toml: cannot be read"),
        ("a.py", "def", "a.py: cannot be read"),
        ("a.sh", "python a.py 'open", "a.sh: cannot be read"),
        ("a.yaml", "[1, 2]", "a.yaml: no settings found"),
        ("a.py", "import os", "a.py: no settings found"),
        ("a.py", "batch_size = 'ten'\ngradient_accumulation_steps = 'two'", "a value cannot be interpreted"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, file: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text)
    assert main(["migrate", file, "--from", "nanogpt"]) == 1
    assert said in capsys.readouterr().err
    assert not Path("project.yaml").exists()


def test_a_project_is_not_overwritten_and_a_program_has_to_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("batch_size = 8")
    Path("project.yaml").write_text("mine")
    assert main(["migrate", "a.py", "--from", "nanogpt"]) == 1
    assert Path("project.yaml").read_text() == "mine"
    assert main(["migrate", "a.py", "--from", "nemo"]) == 1
    said = capsys.readouterr().err
    assert "project.yaml cannot be written; choose a different name with --output (File exists)" in said
    assert "unknown program 'nemo'; known: deepspeed, " in said


KNOWN = ", ".join(name for stem, origin in origins().items() for name in (stem, *origin.aliases))


def lost(folder: Path, name: str, settings: dict[str, Any], section: str = "") -> tuple[Any, list[str], int | None]:
    """Return the project, the notes and the ranks of a file with these settings."""
    (file := folder / "a.json").write_text(json.dumps({section: settings} if section else settings))
    text, notes, ranks = migrate(file, origins()[name])
    return yaml.safe_load(text), notes, ranks


SECTIONS = {"lavis": ("run", "model"), "deepspeed": ("", "zero_optimization", "fp16"), "torchtitan": (
    "training", "model", "optimizer", "lr_scheduler", "parallelism", "checkpoint", "metrics", "profiling", "job",
)}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name == "nanogpt" else pytest.param(name, marks=pytest.mark.slow) for name in origins()]
)
def test_no_setting_vanishes(tmp_path: Path, name: str) -> None:
    """A key alone, at a value that is nobody's default, changes the project or a note."""
    silent = set()
    for section in SECTIONS.get(name, ("",)):
        nothing = lost(tmp_path, name, {"unheard_of": ""}, section)
        for key in origins()[name].answers.maps[0]:
            for value in (7, "x"):
                try:
                    project, notes, ranks = lost(tmp_path, name, {key: value}, section)
                except ConfigError:
                    continue  # "a value cannot be interpreted"
                if (project, notes, ranks) == nothing:
                    silent.add((key, value))
    assert silent == set()


def test_sections_of_deepspeed_are_answered_as_a_whole_and_none_that_is_off(tmp_path: Path) -> None:
    off = {"comet": {"enabled": False, "project": "p"}, "fp16": {"enabled": False, "loss_scale": 4}}
    zero = {"stage": 2, "stage3_max_live_parameters": 5, "ignore_unused_parameters": False, "overlap_comm": "auto"}
    on = {"flops_profiler": {"enabled": True, "profile_step": 1, "detailed": True}, "aio": {"queue_depth": 4}}
    step = {"min_difficulty": 8, "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 8}, "profile": True}
    tree, notes, _ = lost(tmp_path, "deepspeed", off | on | {"zero_optimization": zero, "curriculum_learning": step})
    assert tree["run"]["curriculum"] == {"start": 8, "steps": 9, "multiple_of": 8}
    assert tree["run"]["runner"] == {
        "name": "deepspeed",
        "stage": 2,
        "ignore_unused_parameters": False,
        "aio": {"queue_depth": 4},
    }
    assert "profile" not in tree["run"]
    (said,) = [note for note in notes if "flops" in note]
    assert said.startswith("not needed here: flops_profiler: ")
    assert any("stage3_max_live_parameters: ZeRO stage 2 ignores it" in note for note in notes)
    assert not any(word in note for note in notes for word in ("comet", "fp16", "overlap_comm"))


def test_files_that_a_command_or_a_configuration_names_are_read_and_accounted_for(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "{distributed_type: FSDP, mixed_precision: bf16, num_processes: 4, unheard_of: 3, fsdp_config: {"
        "fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_offload_params: true, fsdp_activation_checkpointing: true}}"
    )
    (script := tmp_path / "a.sh").write_text("accelerate launch --config_file fsdp.yaml a.py --use_peft --use_rslora")
    text, notes, ranks = migrate(script, origins()["transformers"])
    run = yaml.safe_load(text)["run"]
    assert run["runner"] == {"name": "fsdp", "reshard_after_forward": False, "cpu_offload": True}
    assert (run["amp"], run["gradient_checkpointing"], ranks) == ("bf16", "full", 4)
    assert any("fsdp.yaml.unheard_of: unknown, and no key" in note for note in notes)
    assert yaml.safe_load(text)["model"]["adapter"] == {"name": "lora", "rank": 16, "alpha": 128, "dropout": 0.05}
    (data := tmp_path / "data").mkdir()
    (data / "mine.json").write_text("[]")
    (data / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}, "hub": {"hf_hub_url": "x"}}')
    tree, _, _ = lost(tmp_path, "llama_factory", {"dataset": "mine"})
    assert tree["datasets"]["data"]["path"] == str(data / "mine.json")
    assert tree["run"]["gradient_checkpointing"] == "full"
    assert lost(tmp_path, "llama_factory", {"dataset": "mine,hub"})[0]["datasets"]["data"]["path"] == "???"


def test_defaults_of_hugging_face_lose_nothing(tmp_path: Path) -> None:
    """The files are what transformers 5.23, TRL 1.16 and PEFT 0.21 write of objects without arguments."""
    defaults = json.loads((ROOT / "tests" / "config" / "hugging_face_defaults.json").read_text())
    for name, settings in defaults.items():
        tree, notes, _ = lost(tmp_path, "transformers", settings)
        assert not [note for note in notes if note.startswith("not carried over")], name
        (project := tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
        loaded(project, tree)
        adapter = {"name": "lora", "rank": 8, "alpha": 8, "dropout": 0.0} if name == "LoraConfig" else None
        assert tree["model"].get("adapter") == adapter
        assert tree["run"].get("objective", {}).get("name") == {"DPOConfig": "dpo", "KTOConfig": "kto"}.get(name)
    two = {"bf16": True, "amp": "bf16", "fp16": False, "gradient_checkpointing": True, "activation_checkpointing": True}
    for more in ({"optim": "adamw_bnb_8bit"}, {"f_divergence_type": "js_divergence"}, {"eval_delay": 5}):
        (note,) = [note for note in lost(tmp_path, "transformers", two | more)[1] if note.startswith("not carried")]
        assert next(iter(more)) in note


def test_steps_and_epochs_of_hugging_face(tmp_path: Path) -> None:
    for settings, wanted in (
        ({"max_steps": 20, "num_train_epochs": 3.0}, (20, None)),
        ({"max_steps": -1, "num_train_epochs": 2.0}, (None, 2)),
        ({"max_steps": 20, "num_train_epochs": -1}, (20, None)),
        ({"num_train_epochs": 1.5}, (None, 2)),
    ):
        tree, notes, _ = lost(tmp_path, "transformers", settings)
        assert (tree["run"].get("max_iters"), tree["run"].get("max_epoch")) == wanted
        said = [note for note in notes if note.startswith("not carried over")]
        assert said == [
            "not carried over: num_train_epochs: 1.5 is not a whole number, so run.max_epoch is 2; "
            "for a different length, set run.max_iters"
        ] * (settings.get("num_train_epochs") == 1.5)


SCRIPT = """
from datasets import load_dataset
NAME = "Qwen/Qwen3-0.6B"
open("ran", "w")
def main():
    model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = trl.SFTConfig("out", learning_rate=1e-3 * 2, max_steps=20, num_train_epochs=1, seed=int(os.environ["SEED"]))
    data = load_dataset("json", data_files="chat.jsonl", split="train")
    SFTTrainer(model=model, args=args, train_dataset=data, peft_config=lora).train()
"""


def test_literal_arguments_of_a_python_script_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text("{}")
    Path("a.py").write_text(SCRIPT)
    text, notes, _ = migrate(Path("a.py"), origins()["transformers"])
    tree = yaml.safe_load(text)
    assert tree["model"]["pretrained"] == tree["datasets"]["data"]["tokenizer"] == "Qwen/Qwen3-0.6B"
    assert tree["model"]["adapter"] == {"name": "lora", "rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj"]}
    assert tree["datasets"]["data"]["path"] == "chat.jsonl"
    run = tree["run"]
    assert (run["output_dir"], run["init_lr"], run["max_iters"], run["amp"]) == ("out", 2e-3, 20, "bf16")
    assert notes == [
        "not needed here: num_train_epochs: max_steps already sets the length of training",
        "not carried over: completion_only_loss: TRL trains only on completions if the rows are prompt and completion; "
        "for such rows, set train_on: last",
        "to be given: run.seed: the file does not set it",
    ]
    assert not Path("ran").exists()
    Path("a.py").write_text("args = DPOConfig(beta=0.2, loss_type=['sigmoid'], max_steps=steps)")
    text, notes, _ = migrate(Path("a.py"), origins()["transformers"])
    run = yaml.safe_load(text)["run"]
    assert (run["objective"], run["amp"]) == ({"name": "dpo", "beta": 0.2}, "bf16")  # TRL's default
    assert run["max_iters"] == "???"
    assert [note for note in notes if note.startswith("not carried")] == [
        "not carried over: disable_dropout: TRL trains on preferences without dropout; if the model has dropout, set "
        "its rates to 0"
    ]
    Path("a.py").write_text("import os\nseed = 1")
    with pytest.raises(
        ConfigError, match="no settings found; a script's settings are the arguments of TrainingArguments, SFT"
    ):
        migrate(Path("a.py"), origins()["transformers"])


@pytest.mark.parametrize(("script", "path", "val", "split"), [
    ('train = load_dataset("json", data_files="chat.jsonl")\nval = load_dataset("json", data_files="val.jsonl")',
     "chat.jsonl", "val.jsonl", None),
    ('val = load_dataset("json", data_files="val.jsonl")["train"]\nd = load_dataset("json", data_files="chat.jsonl")\n'
     'd = d.shuffle(1)\ntrain = d.map(f)\nd = 1', "chat.jsonl", "val.jsonl", None),
    ('d = load_dataset("json", data_files={"train": "chat.jsonl", "validation": "val.jsonl"})\n'
     'train, val = d["train"], d["validation"]', "chat.jsonl", "val.jsonl", None),
    ('d = load_dataset("json", data_files="chat.jsonl").train_test_split(0.1)\ntrain = d["train"]\nval = d["test"]',
     "chat.jsonl", None, [90, 10, 0]),
    ('SHARE = 0.05\nd = load_dataset("json", data_files="chat.jsonl").train_test_split(seed=1, test_size=SHARE)\n'
     'train, val = d["train"], d["test"]', "chat.jsonl", None, [95, 5, 0]),
    ('d = load_dataset("json", data_files="chat.jsonl").train_test_split(0.2)\n'
     'train, val = d["train"], d["test"].train_test_split(0.5)["train"]', "chat.jsonl", None, "???"),
    ('d = load_dataset("json", data_files="chat.jsonl").train_test_split(1 / 3)\ntrain, val = d["train"], d["test"]',
     "chat.jsonl", None, [66.6667, 33.3333, 0]),
    ('train = load_dataset("json", data_files="chat.jsonl")\nval = compute()\nother.train_test_split(0.3)',
     "chat.jsonl", "???", None),
    ('d = load_dataset("json", data_files="chat.jsonl")["train"].train_test_split(test_size=100)\n'
     'train, val = d["train"], d["test"]', "chat.jsonl", None, "???"),
    ('val = load_dataset("json", data_files="val.jsonl")\ntrain = Dataset.from_list(rows)', "???", "val.jsonl", None),
])  # fmt: skip
def test_the_datasets_that_a_trainer_is_given_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, path: str, val: str | None, split: object
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("chat.jsonl", "val.jsonl"):
        Path(name).write_text("{}")
    Path("a.py").write_text(f'{script}\nSFTTrainer("m", train_dataset=train, eval_dataset=val)\n')
    text, notes, _ = migrate(Path("a.py"), origins()["transformers"])
    data = yaml.safe_load(text)["datasets"]["data"]
    assert (data["path"], data.get("val"), data.get("split")) == (path, val, split)
    assert not isinstance(split, list) or not any("eval_dataset" in note for note in notes)


def test_a_trainer_of_ones_own_is_the_one_that_it_is_made_of(tmp_path: Path) -> None:
    script = """class Weighted(trl.SFTTrainer):
    def compute_loss(self, model, inputs): return 2 * model(**inputs).loss
class Own(Weighted):
    def _inner(self): ...
Own("gpt2", args=SFTConfig("out", max_steps=3, learning_rate=1e-3))"""
    (path := tmp_path / "a.py").write_text(script)
    text, notes, _ = migrate(path, origins()["transformers"])
    tree = yaml.safe_load(text)
    assert (tree["model"]["pretrained"], tree["run"]["max_iters"], tree["datasets"]["data"]["name"]) == (
        "gpt2",
        3,
        "chat",
    )
    assert [note for note in notes if "compute_loss" in note or "inner" in note] == [
        "not carried over: compute_loss: set run.objective (an objective receives -log p of each target; see "
        "docs/post-training.md)"
    ]


def test_the_program_is_told_by_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text('T(args=TrainingArguments("out", learning_rate=1.0, max_steps=2, save_steps=1, bf16=True))')
    assert main(["migrate", "a.py"]) == 0
    assert capsys.readouterr().out.startswith("these are settings of Hugging Face's Trainer\n")
    Path("b.py").write_text("seed = 3")
    assert main(["migrate", "b.py"]) == 1
    assert main(["migrate", "c.py"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: b.py: cannot recognize the program of these settings; give --from, one of " + KNOWN,
        "error: c.py: cannot be read (No such file or directory)",
    ]


def test_a_file_of_another_program_is_named(tmp_path: Path) -> None:
    zero = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match="these are settings of DeepSpeed; use --from deepspeed"):
        lost(tmp_path, "transformers", zero)


def test_settings_of_megatron_that_mean_something_else_here(tmp_path: Path) -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
    off = dict.fromkeys(("context_parallel_size", "expert_model_parallel_size", "tensor_model_parallel_size"), 1)
    given = sizes | off | {"tokenizer_type": "NullTokenizer", "vocab_size": 511, "use_flash_attn": True}
    tree, notes, ranks = lost(tmp_path, "megatron_lm", given | {"eod_mask_loss": True, "fp16": True, "bf16": True})
    assert (tree["model"]["vocab_size"], tree["model"]["attention"], ranks) == (512, "sdpa", None)
    assert tree["datasets"]["data"] == {"name": "text", "path": "???", "seq_length": 32, "split": [969, 30, 1]}
    assert not {"num_workers", "log_interval", "eval_interval", "eval_iters"} & tree["run"].keys()
    said = "\n".join(notes)
    assert "parallel" not in said
    assert "bf16: it conflicts with fp16, which is used" in said
    assert "eod_mask_loss: the ends of documents are targets" in said
    assert "use_flash_attn: model.attention is sdpa" in said
    tree, notes, ranks = lost(tmp_path, "megatron_lm", sizes | {"load": "old", "tensor_model_parallel_size": 2})
    assert "resume_from" not in tree["run"]
    assert any("load: Megatron-LM's checkpoints cannot be imported" in note for note in notes)
    tree, notes, _ = lost(tmp_path, "megatron_lm", sizes | {"save_interval": 20, "save_retain_interval": 100})
    kept = {key: tree["run"].get(key) for key in ("save_interval", "save_best", "keep_every")}
    assert kept == {"save_interval": 20, "save_best": False, "keep_every": 100}
    assert any("run.keep_last=null keeps every checkpoint" in note for note in notes)
    assert ranks == 2
    moe = {"num_experts": 4, "moe_router_topk": 2, "num_layers": 6, "swiglu": True, "disable_bias_linear": True}
    moe |= {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001, "moe_router_load_balancing_type": "aux_loss"}
    tree, notes, _ = lost(tmp_path, "megatron_lm", sizes | moe)
    # Megatron-LM divides a layer's loss by the choices and adds layers, where the mean over layers is taken here.
    model = tree["model"]
    assert (model["router_loss"], model["router_loss_coef"]) == ("micro_batch", pytest.approx(0.01 * 6 / 2))
    assert model["router_z_loss_coef"] == pytest.approx(0.006)
    assert "moe_" not in "\n".join(notes)


def test_stretched_positions_of_megatron_are_those_of_llama_3(tmp_path: Path) -> None:
    given = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 512}
    given |= {"swiglu": True, "position_embedding_type": "rope", "rotary_base": 500000, "use_rope_scaling": True}
    tree, notes, _ = lost(tmp_path, "megatron_lm", given | {"rope_scaling_factor": 32.0})
    assert tree["model"]["config"]["rope_parameters"] == {  # the constants are Megatron-LM's
        "rope_type": "llama3",
        "rope_theta": 500000,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope" not in "".join(notes)


# The sizes are those of DeepSeek-V3, in NVIDIA's script for Megatron-FSDP, of Qwen3-30B-A3B and of Qwen1.5-MoE-A2.7B.
MIXTURES = {
    "deepseek_v3": (
        {
            "num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432, "num_attention_heads": 128,
            "num_experts": 256, "kv_channels": 128, "multi_latent_attention": True,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128, "moe_layer_freq": "[0]*3+[1]*58",
            "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048, "moe_router_topk": 8,
            "moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_score_function": "sigmoid",
            "vocab_size": 129280, "qk_layernorm": True, "moe_router_pre_softmax": True,
        },
        671_026_404_352, "multi_latent_attention, qk_layernorm",
    ),
    "qwen3_moe": (
        {
            "num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32,
            "num_experts": 128, "kv_channels": 128, "qk_layernorm": True, "num_query_groups": 4,
            "group_query_attention": True, "moe_ffn_hidden_size": 768, "moe_router_topk": 8, "vocab_size": 151936,
        },
        30_532_122_624, "",
    ),
    "qwen2_moe": (
        {
            "num_layers": 24, "hidden_size": 2048, "ffn_hidden_size": 5632, "num_attention_heads": 16,
            "num_experts": 60, "add_qkv_bias": True, "moe_ffn_hidden_size": 1408,
            "moe_shared_expert_intermediate_size": 5632, "moe_router_topk": 4,
            "moe_router_pre_softmax": True, "vocab_size": 151936,
        },
        14_315_784_192, "moe_shared_expert_gate: qwen2_moe has a gate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_of_megatron_becomes_the_published_model(tmp_path: Path, family: str) -> None:
    """Each setting is carried over, and the model has the number of parameters that its authors give."""
    settings, parameters, said = MIXTURES[family]
    common = {"seq_length": 128, "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
    common |= {"disable_bias_linear": True, "untie_embeddings_and_output_weights": True, "hidden_dropout": 0}
    tree, notes, _ = lost(tmp_path, "megatron_lm", common | settings | {"make_vocab_size_divisible_by": 1})
    assert tree["model"]["config"]["model_type"] == family
    assert said in (listed := "\n".join(note for note in notes if "YaRN" not in note))
    assert "set model.config" not in listed
    kind = registry.get("model", tree["model"].pop("arch"))
    with parameters_on_meta():  # a layer's experts are larger than this machine's memory
        model = kind(kind.Options(**tree["model"]))
    assert sum(p.numel() for p in model.parameters()) == parameters


NUMBERS = re.compile(r"(^run\.\w*(iters|steps?|interval|epoch|lr|decay|clip|fraction|workers|last|every)|size|length)$")
BLEND = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
    "train_samples": 21, "global_batch_size": 2, "micro_batch_size": 1, "save": "o", "reset_position_ids": True,
    "eod_mask_loss": True, "data_path": ["0.5", "a", "0.5", "b"], "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "tok", "eval_interval": 5, "eval_iters": 0, "finetune": True, "no_load_optim": True,
    "load": "x", "lr": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("vocab", [True, False])
def test_a_blend_of_megatron_becomes_a_project_that_loads(
    tmp_path: Path, words: Path, vocab: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of a dataset stand on its parts, the vocabulary is the tokenizer's, nothing of it is silent."""
    if vocab:
        (tmp_path / "tok").symlink_to(words)
    (tmp_path / "a.json").write_text(json.dumps(BLEND | {"swiglu": vocab}))
    project = tmp_path / "p.yaml"
    assert main(["migrate", str(tmp_path / "a.json"), "--from", "megatron", "--output", str(project)]) == 0
    tree, said = yaml.safe_load(project.read_text()), capsys.readouterr().out
    assert tree["datasets"]["data"].keys() == {"name", "parts"}
    assert all(part["dataset"]["document_mask"] for part in tree["datasets"]["data"]["parts"])
    size = (tree["model"]["config"] if vocab else tree["model"])["vocab_size"]
    assert size == (load_tokenizer(words).vocab_size if vocab else "???")
    assert not {"resume_optimizer", "eval_iters", "eval_interval"} & tree["run"].keys()
    assert "finetune: to begin at step 1 with these weights, set model.pretrained to" in said
    assert "train_samples: 21 is not a multiple of the batch size, 2; the remainder, 1, is left out" in said
    load_config(project, [] if vocab else ["model.vocab_size=60"])


@pytest.mark.parametrize(
    "name", [name if name == "nanogpt" else pytest.param(name, marks=pytest.mark.slow) for name in origins()]
)
def test_a_number_that_means_off_loads(tmp_path: Path, name: str) -> None:
    """0 and -1 of every key that is one of `run` here make a project that loads, once ??? is given."""
    for key, answer in origins()[name].answers.maps[0].items():
        if re.fullmatch(r"run\.\w+", kind := answer.partition(":")[0]) and NUMBERS.search(kind):
            for value in (0, -1):
                for section in SECTIONS.get(name, ("",)):
                    tree, _, _ = lost(tmp_path, name, {key: value}, section)
                    (tmp_path / "p.yaml").write_text(yaml.safe_dump(tree))
                    values = {"split": "[9,1]"}
                    given = [
                        f"{k}={8 if NUMBERS.search(k) else values.get(k.rpartition('.')[2], 'x')}"
                        for k in to_give(tree)
                    ]
                    load_config(tmp_path / "p.yaml", given)


def test_zeros_inside_sections_are_kept_or_named(tmp_path: Path) -> None:
    adam = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0, 0.9], "eps": 0}}
    steps = {"total_curriculum_step": 9, "difficulty_step": 0}
    tree, notes, _ = lost(
        tmp_path,
        "deepspeed",
        {
            "optimizer": adam,
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 0},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 0},
            "curriculum_learning": {"enabled": True, "min_difficulty": 8, "schedule_config": steps},
        },
    )
    run = tree["run"]
    assert run["optimizer"] == {"name": "adamw", "betas": [0, 0.9]}
    assert (run["curriculum"], run["amp"]["dtype"]) == ({"start": 8, "steps": 9}, "fp16")
    assert run["runner"] == {"name": "deepspeed", "stage": 2}
    for key in ("runner.reduce_bucket_size", "amp.window", "curriculum.multiple_of", "optimizer.eps"):
        assert any(f"run.{key}" in note and "got 0; it is left out" in note for note in notes), key
    tree, _, _ = lost(tmp_path, "nanogpt", {"beta1": 0, "beta2": 0.9}, "")
    assert tree["run"]["optimizer"]["betas"] == [0, 0.9]


def test_the_next_command_has_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    migrated(tmp_path, "megatron_llama3")
    said = capsys.readouterr().out
    assert said.endswith("--dry-run --world-size 8\n")  # torchrun --nproc_per_node 8
    assert "???" not in said
    migrated(tmp_path, "megatron_gpt3")
    said = capsys.readouterr().out
    assert "next: fill in the values that are ??? in " in said
    assert said.endswith("--dry-run --world-size 128\n")  # 8 x 16


def test_the_pages_have_the_lists_of_keys() -> None:
    spec = spec_from_file_location("write_foreign_keys", ROOT / "docs" / "write_foreign_keys.py")
    spec.loader.exec_module(generator := module_from_spec(spec))
    pages = sorted((ROOT / "docs").glob("from-*.md"))
    assert len(pages) == len(origins()) + 1 == 8  # ColossalAI is driven from Python, so its page has no list of keys
    for page in pages:
        assert page.read_text() == generator.written(page), "run: python docs/write_foreign_keys.py"
        assert "| `" in page.read_text()


@pytest.mark.slow
def test_the_small_project_in_the_manner_of_lavis_trains(tmp_path: Path) -> None:
    data = [sys.executable, str(ROOT / "projects" / "write_instructions.py"), "--output", "data/instructions"]
    short = [
        "run.max_epoch=null",
        "run.max_iters=30",
        "run.warmup_steps=5",
        "run.eval_interval=15",
        "run.log_interval=1",
    ]
    train = [sys.executable, str(ROOT / "train.py"), "--cfg-path", "projects/instructions_small.yaml"]
    for command in ([*data, "--images", "200"], [*train, "--nproc-per-node", "1", "--options", *short]):
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "output/instructions_small/metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 30
    assert losses[-1] < 0.7 * losses[0]  # from a uniform distribution over 60 words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("nanogpt", 8), ("torchtitan", 64), ("megatron_gpt2", 2), ("megatron_gpt3", 128), ("megatron_llama3", 128)],
)
def test_a_project_whose_paths_exist_passes_a_dry_run(
    tmp_path: Path, name: str, ranks: int, workspace: Workspace
) -> None:
    """Data and tokenizers are small ones in their place; the model and its layout are the configuration's."""
    project, tree = migrated(tmp_path, name)
    label = next(iter(tree["datasets"]))
    entry = workspace.config["datasets"]["tiny"]
    small = {"output_dir": str(tmp_path / "out"), "num_workers": 0, "trackers": []}
    tree |= {"datasets": {label: entry}, "run": tree["run"] | small}
    project.write_text(yaml.safe_dump(tree))
    assert main(["train", "--cfg-path", str(project), "--dry-run", "--world-size", str(ranks)]) == 0


def test_of_two_lengths_of_a_warmup_one_is_carried_over(tmp_path: Path) -> None:
    given = {"warmup_ratio": 0.03, "warmup_steps": 500, "max_iters": 9, "beta2": 0.98, "init_lr": 1e-4}
    both = {"model": {"arch": "minigpt4qwen"}, "run": given | {"deepspeed_config": {"zero_optimization": {"stage": 2}}}}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(both))
    text, notes, _ = migrate(tmp_path / "both.yaml", origins()["lavis"])
    run = yaml.safe_load(text)["run"]
    assert run["warmup_steps"] == 500
    assert "warmup_fraction" not in run
    assert run["optimizer"]["betas"] == [0.9, 0.98]
    assert "not needed here: run.warmup_ratio: LAVIS reads only run.warmup_steps" in notes
    assert not any("beta2" in note for note in notes)


@pytest.mark.parametrize(("rest", "val", "split"), [
    ("eval_dataset: held", "data/held.json", None), ("eval_dataset: other", "???", None), ("", None, "???"),
])  # fmt: skip
def test_validation_of_llama_factory_has_its_file_or_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str, val: str | None, split: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/held.json").write_text("[]")
    Path("data/dataset_info.json").write_text('{"held": {"file_name": "held.json"}}')
    Path("a.yaml").write_text(f"dataset: mine\neval_strategy: steps\neval_steps: 5\n{rest}\n")
    data = yaml.safe_load(migrate(Path("a.yaml"), origins()["llama_factory"])[0])["datasets"]["data"]
    assert (data.get("val"), data.get("split")) == (val, split)


@pytest.mark.parametrize(("program", "name", "text"), [
    ("transformers", "a.py",
     "TrainingArguments('o', eval_strategy='epoch', save_strategy='epoch', num_train_epochs=2)"),
    ("lavis", "a.yaml",
     "model: {arch: blip2_opt}\nrun: {task: captioning, max_epoch: 2, save_freq: 1, valid_splits: [val]}"),
])  # fmt: skip
def test_what_is_done_after_each_epoch_is_carried_over(tmp_path: Path, program: str, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    run = yaml.safe_load(migrate(tmp_path / name, origins()[program])[0])["run"]
    assert (run["max_epoch"], run["save_interval"]) == (2, "epoch")
    assert run.get("eval_interval") == ("epoch" if program == "transformers" else None)


def test_early_stopping_of_a_script_keeps_its_patience(tmp_path: Path) -> None:
    call = "EarlyStoppingCallback(3, early_stopping_threshold=0.1)"
    (tmp_path / "a.py").write_text(f"Trainer(model, callbacks=[{call}])\nTrainingArguments('o', eval_strategy='steps')")
    text, notes, _ = migrate(tmp_path / "a.py", origins()["transformers"])
    assert yaml.safe_load(text)["run"]["callbacks"] == [{"name": "early_stopping", "patience": 3, "min_delta": 0.1}]
    (said,) = [note for note in notes if "callbacks" in note]
    assert said.startswith("not needed here: callbacks: run.callbacks has early_stopping")
