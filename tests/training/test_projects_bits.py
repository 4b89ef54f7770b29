"""Projects that come with the program, and runs from before, train to the same bits, or CHANGELOG.md names the change.

projects_bits.json, beside this file, holds the losses, gradient norms, learning rates and a hash of the final
parameters and optimizer state of every project, in small sizes, on one CPU process, and of runs that began in earlier
formats. `write_record` makes it with the code of an earlier
commit: check that commit out, copy this file to its tests/training, and run there

    PYTHONPATH=platform:tests OMP_NUM_THREADS=1 python tests/training/test_projects_bits.py

and copy projects_bits.json back. Bits depend on the processor and on the releases of libraries, so the record also has
the results of a few operators of torch. Where those differ, the tests are skipped, and a record of one's own is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors import safe_open

from conftest import ROOT
from fixtures_ranks import mostly_slow, run_ranks
from fixtures_shards import write_shard

RECORD = Path(__file__).with_name("projects_bits.json")
KEYS = ("loss", "grad_norm", "lr", "val_loss")  # of a line of metrics.jsonl
FORMATS = ROOT / "tests" / "checkpoint"
RUNS = ("format_1/ddp", "format_1/zero3", "format_2/ddp")  # checkpoints at step 4 of 8
TOKENS = FORMATS / "format_1" / "tiny"  # a prepared dataset, so that nothing is tokenized anew
WORDS = ("alpha", "beta", "gamma", "delta", "the", "of", "a", "is")

RUN = (
    "run.max_iters=3", "run.global_batch_size=4", "run.micro_batch_size=2", "run.eval_interval=3", "run.eval_iters=1",
    "run.log_interval=1", "run.save_interval=3", "run.num_workers=0", "run.device=cpu", "run.warmup_fraction=null",
    "run.warmup_steps=1",
)  # fmt: skip
GPT2 = ("model.n_layer=2", "model.n_embd=32", "model.n_head=2", "model.n_positions=32", "model.vocab_size=300")
BF16 = "run.amp=bf16"  # where the project has fp16
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
DECODER = (
    "model.config.vocab_size=300", "model.config.hidden_size=32", "model.config.intermediate_size=48",
    "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=2",
    "model.config.max_position_embeddings=64",
)  # fmt: skip
EXPERTS = ("model.config.num_experts=4", "model.config.moe_intermediate_size=16", "model.config.head_dim=8")


def _text(name: str) -> tuple[str, ...]:
    return f"datasets.{name}.path={TOKENS}", f"datasets.{name}.seq_length=32", f"datasets.{name}.prepare=null"


def _chat(name: str, file: str, length: int = 64) -> tuple[str, ...]:
    return f"datasets.{name}.path={file}", f"datasets.{name}.seq_length={length}", "run.max_epoch=null"


def _images(*parts: str) -> tuple[str, ...]:
    """The tiny vision-language model, and its images at each of these places of the configuration."""
    sizes = [
        "vision.pretrained=null", "vision.encoder=eva_giant_patch14_224", "vision.image_size=16", "vision.patch_size=8",
        "vision.embed_dim=32", "vision.depth=2", "vision.num_heads=2", "vision.mlp_ratio=2.0", "vision.precision=bf16",
        "qformer.pretrained=null", "qformer.num_query_tokens=4", "qformer.hidden_size=32",
        "qformer.num_hidden_layers=2", "qformer.num_attention_heads=2", "qformer.intermediate_size=64",
        "language_model.model.pretrained=null", "language_model.model.vocab_size=64",
        "language_model.model.hidden_size=32", "language_model.model.intermediate_size=48",
        "language_model.model.num_hidden_layers=2", "language_model.model.num_attention_heads=4",
        "language_model.model.num_key_value_heads=2", "language_model.model.max_position_embeddings=256",
    ]  # fmt: skip
    data = []
    for part in parts:
        data += [f"{part}.tokenizer=data/instructions/tokenizer", f"{part}.image_tokens=4"]
        data += [f"{part}.vis_processor.{split}.image_size=16" for split in ("train", "eval")]
    return "model.model_type=null", *(f"model.{size}" for size in sizes), *data


MINE = (
    "model.pretrained=null", *_chat("mine", "chat.jsonl"), f"datasets.mine.tokenizer={TOKENS}/tokenizer",
    f"datasets.mine.chat_template={json.dumps(TEMPLATE)}", "datasets.mine.split=[90,10,0]",
)  # fmt: skip
PARTS = [f"datasets.mixed.parts.{i}.dataset" for i in (0, 1)]
OPTIONS: dict[str, tuple[str, ...]] = {
    "quickstart": ("model.n_embd=32", "model.n_layer=2", "model.n_head=2", *_text("stdlib"), "run.sample_prompts=[]"),
    "gpt2_chat_sft": _chat("docstrings", "chat.jsonl"),
    "gpt2_chat_lora": _chat("docstrings", "chat.jsonl"),
    "gpt2_chat_dpo": _chat("docstrings", "preference.jsonl"),
    "gpt2_345m": (*GPT2, *_text("webtext"), BF16),
    "gpt2_345m_8gpu": (*GPT2, *_text("webtext"), BF16),
    "gpt2_345m_dp2": (*GPT2, *_text("webtext"), BF16),
    "gpt2_345m_tp2": (*GPT2, *_text("webtext"), BF16, "run.runner=megatron"),
    "gpt3_125m": (*GPT2, *_text("wiki"), BF16),
    "gpt3_1_3b": (*GPT2, *_text("wiki"), BF16),
    "gpt3_13b": (*GPT2, *_text("wiki"), BF16, "run.runner.pipeline_parallel=1"),
    "gpt3_175b": (
        *GPT2, *_text("wiki"), "run.runner.pipeline_parallel=1", "run.runner.tensor_parallel=1",
        "run.runner.sequence_parallel=false",
    ),
    "gpt3_1_3b_moe128": (*DECODER, *EXPERTS, *_text("wiki"), "run.runner.expert_parallel=1"),
    "qwen3_moe_tiny": (*DECODER, *EXPERTS, *_text("stdlib"), "run.sample_prompts=[]"),
    "qwen3_30b_a3b": (
        *DECODER, *EXPERTS, *_text("mine"), "model.pretrained=null", "model.config.num_experts_per_tok=2",
        "run.runner.expert_parallel=1",
    ),
    "llama3_8b_sft": (*DECODER, *MINE),
    "qwen2_5_7b_lora": (*(size.replace(".config.", ".") for size in DECODER), *MINE),
    "blip2_qwen_shapes": ("datasets.shapes.images=64", "datasets.shapes.held_out=8"),
    "instructions_small": ("run.max_epoch=null",),
    "blip2_qwen7b_align": (
        *_images("datasets.captions"), "datasets.captions.train=data/captions.tar",
        "datasets.captions.val=data/captions.tar",
    ),
    "blip2_qwen7b_instruct": (
        *_images(*PARTS), "run.max_epoch=null",
        f"{PARTS[0]}.annotations=data/instructions/llava.json", f"{PARTS[1]}.annotations=data/captions.json",
        *(f"{part}.images=data/instructions/images" for part in PARTS), *(f"{part}.split=[80,20,0]" for part in PARTS),
        *(f"{part}.max_length=128" for part in PARTS),
    ),
}  # fmt: skip
OPTIONS["image_text_shapes"] = (
    "datasets.shapes.images=64",
    "datasets.shapes.held_out=8",
    "datasets.shapes.path=data/seen",
)
_SUMS = ("datasets.sums.path=data/sums",)
OPTIONS["arithmetic_guesses"] = _SUMS
_FIRST = yaml.safe_load((ROOT / "projects" / "arithmetic_guesses.yaml").read_text())["model"]["config"]
OPTIONS["grpo_arithmetic"] = (*_SUMS, "model.pretrained=null", f"model.config={json.dumps(_FIRST)}")
_TINY = yaml.safe_load((ROOT / "projects" / "image_text_shapes.yaml").read_text())["model"]["config"]
_LARGE = ("qwen2_5_vl_7b_lora", "qwen3_vl_30b_a3b", "llava_onevision_7b", "internvl_8b")
for _name in _LARGE:  # with the tiny model and its processor
    OPTIONS[_name] = (
        "model.model_type=null", "model.pretrained=null", f"model.config={json.dumps(_TINY)}",
        "datasets.mine.annotations=data/instructions/llava.json", "datasets.mine.images=data/instructions/images",
        "datasets.mine.processor=data/seen/processor", "datasets.mine.max_length=128", "datasets.mine.split=[80,20,0]",
        "run.max_epoch=null", "run.runner=ddp",
    )  # fmt: skip
NEEDS = dict.fromkeys(_LARGE, "image_text_shapes") | {
    "gpt2_chat_sft": "quickstart", "gpt2_chat_lora": "quickstart", "gpt2_chat_dpo": "gpt2_chat_sft",
    "blip2_qwen7b_instruct": "blip2_qwen7b_align",
}  # fmt: skip
QUICK = ["quickstart", "gpt2_345m_tp2"]


def write_data(folder: Path) -> None:
    """Write conversations, preferences and images for the projects that train on them."""
    rng = np.random.default_rng(0)
    chats, preferences = [], []
    for _ in range(60):
        question, good, bad = (" ".join(rng.choice(WORDS, n)) for n in (3, 5, 4))
        prompt = [{"role": "user", "content": question}]
        chats.append({"messages": [*prompt, {"role": "assistant", "content": good}]})
        answers = {"chosen": good, "rejected": bad}
        preferences.append({"prompt": prompt} | {k: [{"role": "assistant", "content": v}] for k, v in answers.items()})
    for name, rows in (("chat", chats), ("preference", preferences)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data").mkdir()
    shutil.copytree(TOKENS, folder / "data" / "quickstart")  # with the tokenizer of conversations
    runpy.run_path(str(ROOT / "projects" / "write_instructions.py"))["write"](folder / "data" / "instructions", 40)
    images = sorted((folder / "data" / "instructions" / "images").iterdir())
    write_shard(folder / "data" / "captions.tar", [{"jpg": i.read_bytes(), "txt": b"a red circle"} for i in images])
    captions = [{"image": image.name, "caption": "a red circle"} for image in images]
    (folder / "data" / "captions.json").write_text(json.dumps(captions))


def results(folder: Path, name: str) -> dict[str, Any]:
    """Train a project in `folder`, after the project that it begins with, and return what is recorded of it."""
    if name in NEEDS and not (folder / "output" / NEEDS[name]).exists():
        results(folder, NEEDS[name])
    run_ranks(1, _train, str(folder), str(ROOT / "projects" / f"{name}.yaml"), (*RUN, *OPTIONS[name]))
    return _recorded(folder / "output" / name, 3)


def results_of_run(folder: Path, written: str) -> dict[str, Any]:
    """Continue one of the RUNS from its step 4 to its end, and return what is recorded of it."""
    output = folder / "runs" / written
    shutil.copytree(FORMATS / written, output / "checkpoints" / "step_000004")
    options = (f"run.output_dir={output}", f"datasets.tiny.path={TOKENS}")
    run_ranks(1, _train, str(folder), str(FORMATS / "format_1" / "project.yaml"), options)
    return _recorded(output, 8)


def _train(folder: str, project: str, options: tuple[str, ...]) -> int:
    from crosstrain.config.load import load_config
    from crosstrain.training.preflight import preflight
    from crosstrain.training.worker import train_worker

    os.chdir(folder)
    return train_worker(preflight(load_config(project, options), 1).config.plain, True)


def _recorded(output: Path, step: int) -> dict[str, Any]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: row[key] for key in KEYS if key in row} for row in rows]
    return {"rows": kept, "state": _hash(output / "checkpoints" / f"step_{step:06d}")}


def _hash(checkpoint: Path) -> str:
    """Hash names and contents of all tensors of a checkpoint, optimizer state included."""
    found = hashlib.sha256()
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def machine() -> dict[str, str]:
    """Versions of the libraries, and a hash of operators that training uses, computed by torch without this program."""
    return run_ranks(1, _operators)[0]


def _operators() -> dict[str, str]:
    found = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x = torch.randn(2, 32, 32, dtype=dtype, requires_grad=True)
        weight = torch.randn(32, 48, dtype=dtype, requires_grad=True)
        heads = x.view(2, 32, 4, 8).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        y = torch.nn.functional.gelu(torch.nn.functional.dropout(attended.transpose(1, 2).reshape(2, 32, 32) @ weight))
        loss = torch.nn.functional.cross_entropy(y.float().flatten(0, 1), torch.arange(64) % 48)
        loss.backward()
        for tensor in (loss, x.grad, weight.grad):
            found.update(tensor.detach().float().numpy().tobytes())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    return versions | {"machine": platform.machine(), "operators": found.hexdigest()}


def write_record() -> None:
    """Write the record of the code that is imported."""
    made: dict[str, Any] = {"machine": machine(), "projects": {}, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name in OPTIONS:
            made["projects"][name] = results(Path(folder), name)
            print(name, made["projects"][name]["rows"][-1])
        for written in RUNS:
            made["runs"][written] = results_of_run(Path(folder), written)
    RECORD.write_text(json.dumps(made, indent=1) + "\n")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found = json.loads(RECORD.read_text())
    if (here := machine()) != found["machine"]:
        pytest.skip(f"the record is of {found['machine']}, and here is {here}: see this file's first lines")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("projects")
    write_data(made)
    return made


def test_every_project_is_recorded() -> None:
    projects = {path.stem for path in (ROOT / "projects").glob("*.yaml")}
    assert projects == OPTIONS.keys() == json.loads(RECORD.read_text())["projects"].keys()


@pytest.mark.parametrize("name", mostly_slow(OPTIONS, QUICK))
def test_a_project_trains_to_the_bits_of_the_record(record: dict[str, Any], folder: Path, name: str) -> None:
    assert results(folder, name) == record["projects"][name]


@pytest.mark.parametrize("written", mostly_slow(RUNS, ["format_2/ddp"]))
def test_a_run_from_before_goes_on_to_the_bits_of_the_record(
    record: dict[str, Any], folder: Path, written: str
) -> None:
    assert results_of_run(folder, written) == record["runs"][written]


if __name__ == "__main__":
    write_record()
