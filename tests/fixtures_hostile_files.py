"""Hostile files by kind, the command that meets each, and the program that runs it and is measured."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pickle
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import save_file

from conftest import ENVIRONMENT, ROOT, kill_session
from fixtures_chat import write_tokenizer
from fixtures_ranks import forked
from fixtures_tampering import plant, seal

SECONDS, BYTES = 20.0, 2 << 30
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # noqa: E501
TEXT = "the cat sat on the mat, and said: hello world! " + "a" * 3000 + "b   " + "x" * 200 + " 0123456789 naïve ☃"


@dataclass(frozen=True)
class Hostile:
    """Hostile files, and the arguments of the program that meets them."""

    name: str
    make: Callable[[Path, Path], list[str]]  # of a folder to write in, and a file that only executed code makes


# ---- tokenizers


def _replace(pattern: str, content: str, regex: bool = False) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex" if regex else "String": pattern}, "content": content}


def _split(regex: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}


def _several(key: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", key: steps}


_LEVELS = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": False, "trim_offsets": True}
_GROWS = _replace("a", "a" * 10_000)
_ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
_MANY = {"x": {"id": "x", "ids": [0] * 10**6, "tokens": ["x"] * 10**6}}
_A = [{"Sequence": {"id": "A", "type_id": 0}}]
TOKENIZERS: dict[str, dict[str, Any]] = {
    "a text that grows five times": {"normalizer": _several("normalizers", [_GROWS] * 5)},
    "a text that grows twice": {"normalizer": _several("normalizers", [_GROWS] * 2)},
    "a text that grows by one long word": {"normalizer": _replace("cat", "cat" * 10**7)},
    "a long text before each": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**8}},
    "bytes that double": {"normalizer": _several("normalizers", [{"type": "ByteLevel"}] * 40)},
    "spaces that multiply": {"pre_tokenizer": _several("pretokenizers", [_LEVELS] * 300)},
    "a hundred thousand steps": {"normalizer": _several("normalizers", [{"type": "NFKD"}] * 100_000)},
    "an expression that backtracks": {"pre_tokenizer": _split("(a+)+b|(a|a)*$")},
    "an expression of squares": {"pre_tokenizer": _split("a*a*$")},
    "an expression of cubes": {"pre_tokenizer": _split("a*a*a*$")},
    "an expression that removes": {"normalizer": _replace("(x+x+)+y", "", regex=True)},
    "an expression in an expression": {"pre_tokenizer": _split("((((a{1,1000}){1,1000}){1,1000}){1,1000})")},
    "an expression too deep": {"pre_tokenizer": _split("(" * 100_000 + "a" + ")" * 100_000)},
    "an expression that is none": {"pre_tokenizer": _split("(")},
    "no charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}},
    "pieces of nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "padding to a billion": {
        "padding": {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "a"},
    },
    "padding to a multiple": {
        "padding": {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 10**10, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "a"},
    },
    "truncation to nothing": {
        "truncation": {"direction": "Left", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    },
    "a stride beyond the length": {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 10**9},
    },
    "a template of a million tokens": {
        "post_processor": {"type": "TemplateProcessing", "pair": _A, "special_tokens": _MANY,
                           "single": [*_A, *([{"SpecialToken": {"id": "x", "type_id": 0}}] * 100)]},
    },
    "a post processor without its token": {
        "post_processor": {"type": "RobertaProcessing", "sep": ["x", 2**32 - 1], "cls": ["y", 1], "trim_offsets": True,
                           "add_prefix_space": True},
    },
    "words that are stripped from far": {"decoder": {"type": "Strip", "content": "a", "start": 10**18, "stop": 10**18}},
    "words that grow again": {"decoder": _several("decoders", [_GROWS] * 4)},
    "words that are searched": {"decoder": _replace("(t+)+$|(a|a)*$", "x", regex=True)},
    "words in endless steps": {"decoder": _several("decoders", [{"type": "Fuse"}] * 100_000)},
    "words between nothing": {"decoder": _several("decoders", [_replace("", "x" * 1000)] * 6)},
    "a dropout": {"model": {"dropout": 2.0}},
    "an id beyond all": {"added_tokens": [_ADDED | {"id": 4_000_000_000, "content": "zz"}]},
    "a negative id": {"added_tokens": [_ADDED | {"id": -1, "content": "zz"}]},
    "a token of nothing": {"added_tokens": [_ADDED | {"id": 500, "content": ""}]},
    "a token of a million letters": {"added_tokens": [_ADDED | {"id": 500, "content": "a" * 10**6}]},
    "a hundred thousand tokens": {"added_tokens": [_ADDED | {"id": 500 + i, "content": f"t{i}"} for i in range(10**5)]},
    "added tokens that grow": {
        "added_tokens": [_ADDED | {"id": 500, "content": "aaaa"}],
        "normalizer": _several("normalizers", [_GROWS] * 3),
    },
    "merges of nothing": {"model": {"merges": [["zz", "yy"]]}},
    "a prefix of a million letters": {"model": {"continuing_subword_prefix": "z" * 10**7, "unk_token": "a"}},
    "words without a limit": {
        "pre_tokenizer": None,
        "model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 10**18, "vocab": {"</s>": 0, "a": 1, "##a": 2}},
    },
    "words with long pieces": {
        "pre_tokenizer": None,
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
                  "vocab": [["</s>", 0.0], *([["a" * n, -1.0] for n in range(1, 3000)])]},
    },
    "scores that are none": {
        "model": {"type": "Unigram", "unk_id": 7, "vocab": [["</s>", 1e308], ["a", -1e308]], "byte_fallback": True},
    },
    "a model of another kind": {"model": {"type": "Evil", "code": "__import__('os').system('touch harm')"}},
}  # fmt: skip


def write_bomb(folder: Path, changes: dict[str, Any], template: str = TEMPLATE) -> Path:
    """A tokenizer with these changes, of single keys in its model."""
    write_tokenizer(folder, template)
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    for key, value in changes.items():
        if key == "added_tokens":
            document[key] += value
        elif key == "model" and "type" not in value:
            document[key] |= value
        else:
            document[key] = value
    path.write_text(json.dumps(document))
    return folder


def _raw(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _config(**more: Any) -> Callable[[Path], object]:
    """Changes tokenizer_config.json."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))

    return change


def _special(name: str, kind: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name) if kind == "fifo" else (folder / name).symlink_to(kind)

    return change


CODE = "from pathlib import Path\nPath({!r}).touch()\nclass Evil: pass\n"
FOLDERS: dict[str, Callable[[Path], object]] = {
    "code for the tokenizer": _config(auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, tokenizer_class="Evil"),
    "code elsewhere": _config(auto_map={"AutoTokenizer": "evil/model--evil.Evil"}, tokenizer_class="Evil"),
    "a class with files": _config(tokenizer_class="LlamaTokenizer", vocab_file="/dev/zero"),
    "a class that rebuilds": _config(tokenizer_class="Qwen2Tokenizer"),
    "an end that is none": _config(eos_token=["a"]),
    "an end that is unknown": _config(eos_token="<fin>"),
    "a template that is a number": _config(chat_template=7),
    "many special tokens": _config(extra_special_tokens=[f"t{i}" for i in range(50_000)]),
    "special tokens of any kind": _config(extra_special_tokens={"a": {"b": 1}}, bos_token=7, pad_token={}),
    "lengths of any kind": _config(model_max_length="x", padding_side="evil"),
    "a configuration too deep": _raw("tokenizer_config.json", b"[" * 10**5),
    "a configuration that is a list": _raw("tokenizer_config.json", b"[]"),
    "a tokenizer too deep": _raw("tokenizer.json", b'{"normalizer":' * 10**5),
    "a pipe for the tokenizer": _special("tokenizer.json", "fifo"),
    "a pipe for the configuration": _special("tokenizer_config.json", "fifo"),
    "a pipe for the template": _special("chat_template.jinja", "fifo"),
    "endless zeros for the tokenizer": _special("tokenizer.json", "/dev/zero"),
    "endless zeros for the template": _special("chat_template.jinja", "/dev/zero"),
    "endless zeros for the vocabulary": _special("vocab.json", "/dev/zero"),
    "secrets for the template": _special("chat_template.jinja", "/etc/passwd"),
}  # fmt: skip


def _prepared(change: Callable[[Path], object]) -> Callable[[Path, Path], list[str]]:
    def make(folder: Path, canary: Path) -> list[str]:
        made = write_tokenizer(folder / "words", TEMPLATE)
        (made / "evil.py").write_text(CODE.format(str(canary)))
        change(made)
        (folder / "input.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
        return ["prepare", "--input", "input.jsonl", "--output", "out", "--tokenizer", str(made), "--workers", "1"]

    return make


def _bomb(changes: dict[str, Any]) -> Callable[[Path], object]:
    return lambda folder: write_bomb(folder, changes)


# ---- chat templates

TEMPLATES = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "a huge text": "{{ 'x' * 10 ** 10 }}",
    "a text of gigabytes": "{{ ('x' * 10 ** 9) | length }}{{ 'y' * 3 * 10 ** 9 }}",
    "a huge number": "{{ 10 ** 10 ** 9 }}",
    "words of Latin": "{{ lipsum(n=99999999) }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a list of lists": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
                       "{{ n.x }}",
    "a wide field": "{{ '%999999999999d' % 1 }}",
    "padding": "{{ ''.center(99999999999) }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the world of a function": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "the world of a loop": "{{ joiner.__init__.__globals__['os'].popen('touch CANARY').read() }}",
    "an error": "{{ 1 / 0 }}",
    "a raised error": "{{ raise_exception('\\x1b[2J all is well') }}",
    "a name": "{{ nothing.at.all }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "no Jinja": "{% for %}",
    "too deep": "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "too deep an expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a long template": "x" * 10**7,
    "nothing": "",
    "marks without end": "{% generation %}" * 100 + "x" + "{% endgeneration %}" * 100,
}  # fmt: skip


def _chat(template: str, changes: dict[str, Any], verb: list[str]) -> Callable[[Path, Path], list[str]]:
    def make(folder: Path, canary: Path) -> list[str]:
        words = write_bomb(folder / "words", changes, template.replace("CANARY", str(canary)))
        turns = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "cat"}]
        (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 3)
        data = {"name": "chat", "path": "chats.jsonl", "tokenizer": str(words), "seq_length": 8000}
        return [*verb, "--cfg-path", _project(folder, datasets={"chats": data})]

    return make


def _project(folder: Path, **changes: Any) -> str:
    config: dict[str, Any] = {
        "model": {"arch": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 1, "n_positions": 8000, "vocab_size": 512},
        "run": {
            "runner": "ddp",
            "output_dir": "out",
            "max_iters": 1,
            "micro_batch_size": 1,
            "init_lr": 1e-3,
            "device": "cpu",
        },
    } | changes
    (folder / "project.yaml").write_text(yaml.safe_dump(config))
    return "project.yaml"


# ---- folders of weights, and adapters

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 16, "n_head": 1,
        "n_positions": 64, "vocab_size": 512}  # fmt: skip
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 16,
         "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 512}  # fmt: skip
CONFIGS: dict[str, dict[str, Any] | bytes] = {
    **{f"{key} of {value}": GPT2 | {key: value}
       for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size") for value in (-1, 0, 10**9, 10**18)},
    **{f"{key} of {value}": LLAMA | {key: value}
       for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads") for value in (-1, 10**12)},
    "layers that are words": GPT2 | {"n_layer": "many"},
    "layers that are a list": GPT2 | {"n_layer": [1] * 1000},
    "sizes that are infinite": json.dumps(GPT2 | {"n_embd": 0.5, "n_layer": 1e300}).encode(),
    "code": GPT2 | {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, "model_type": "evil"},
    "an unknown model": {"model_type": "evil", "architectures": ["Evil"]},
    "several models": {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": -1}},
    "a quantizer": LLAMA | {"quantization_config": {"quant_method": "evil", "modules_to_not_convert": ["*"]}},
    "no object": b"[1]", "no JSON": b"\x80\x04}.", "too deep": b"[" * 10**6,
}  # fmt: skip


def _folder(
    config: dict[str, Any] | bytes, more: Callable[[Path], object] = lambda folder: None
) -> Callable[[Path, Path], list[str]]:
    def make(folder: Path, canary: Path) -> list[str]:
        weights = folder / "weights"
        weights.mkdir()
        (weights / "evil.py").write_text(CODE.format(str(canary)))
        with open(weights / "config.json", "wb") as file:
            file.write(config if isinstance(config, bytes) else json.dumps(config).encode())
        save_file({"transformer.wte.weight": torch.zeros(512, 16)}, weights / "model.safetensors")
        more(weights)
        np.arange(400, dtype=np.uint16).tofile(folder / "tokens.bin")
        data = {
            "name": "text",
            "path": "input",
            "seq_length": 16,
            "tokenizer": str(weights),
            "prepare": {"input": "input.jsonl", "tokenizer": str(write_tokenizer(folder / "words", TEMPLATE))},
        }
        (folder / "input.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
        data.pop("tokenizer")
        model = {"arch": "causal_lm", "pretrained": str(weights)}
        if isinstance(config, dict) and config.get("model_type") == "gpt2":
            model["arch"] = "gpt2"
        return ["train", "--cfg-path", _project(folder, model=model, datasets={"text": data}), "--dry-run"]

    return make


def _link(name: str, kind: str) -> Callable[[Path], object]:
    return _special(name, kind)


def _long(length: int) -> Callable[[Path], object]:
    """A config.json of so many bytes, which take no place."""

    def change(folder: Path) -> None:
        with open(folder / "config.json", "r+b") as file:
            file.truncate(length)

    return change


WEIGHTS: dict[str, Callable[[Path], object]] = {
    "a configuration of 900 MB": _long(900 << 20),
    "a configuration of a terabyte": _long(1 << 40),
    "a configuration of many numbers": lambda folder: (folder / "config.json").write_bytes(
        b'{"model_type": "gpt2", "x": [' + b"1," * (20 << 20) + b"1]}"
    ),
    "a pickle beside the weights": lambda folder: plant(folder / "pytorch_model.bin", folder / "harm", "torch.save"),
    "a pickle for the weights": lambda folder: plant(folder / "model.safetensors", folder / "harm", "pickle"),
    "a header of a petabyte": _raw("model.safetensors", (2**50).to_bytes(8, "little") + b"{}"),
    "a pipe for the weights": _special("model.safetensors", "fifo"),
    "a pipe for the configuration": _special("config.json", "fifo"),
    "endless zeros for the configuration": _special("config.json", "/dev/zero"),
    "an index elsewhere": _raw("model.safetensors.index.json", b'{"weight_map": {"a": "../../../etc/passwd"}}'),
    "an index of pipes": _raw("model.safetensors.index.json", b'{"weight_map": ["a"]}'),
    "a generation without end": _raw("generation_config.json", b"[" * 10**6),
    "a tokenizer's pipe": _special("tokenizer.json", "fifo"),
    "a tokenizer that grows": _raw("tokenizer.json", json.dumps({"normalizer": _GROWS}).encode()),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "a rank of a billion": {"r": 10**9}, "a negative rank": {"r": -1}, "a rank of words": {"r": "x"},
    "a base elsewhere": {"base_model_name_or_path": "../../../../etc"},
    "a base of control characters": {"base_model_name_or_path": "\x1b[2J\nerror: all is well"},
    "targets that backtrack": {"target_modules": "(a+)+$"}, "targets of any kind": {"target_modules": [[1]]},
    "another kind": {"peft_type": "EVIL"}, "a kind that is a number": {"peft_type": 7},
    "code": {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}},
}  # fmt: skip


def _adapter(changes: dict[str, Any], content: bytes | None = None) -> Callable[[Path, Path], list[str]]:
    def make(folder: Path, canary: Path) -> list[str]:
        adapter = folder / "adapter"
        adapter.mkdir()
        usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM"}
        (adapter / "adapter_config.json").write_bytes(content or json.dumps(usual | changes).encode())
        name = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
        save_file({name: torch.zeros(4, 16)}, adapter / "adapter_model.safetensors")
        if content is None and "r" in changes:  # as the adapter, else as the model
            model = {"arch": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 1, "n_positions": 64, "vocab_size": 512,
                     "adapter": {"name": "lora", "pretrained": str(adapter)}}  # fmt: skip
        else:
            model = {"arch": "causal_lm", "pretrained": str(adapter)}
        (folder / "input.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
        words = str(write_tokenizer(folder / "words", TEMPLATE))
        made = {"input": "input.jsonl", "tokenizer": words}
        data = {"name": "text", "path": "input", "seq_length": 16, "prepare": made}
        return ["train", "--cfg-path", _project(folder, model=model, datasets={"text": data}), "--dry-run"]

    return make


# ---- checkpoints to export


def _json(name: str, **more: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | more))

    return change


EXPORTS: dict[str, Callable[[Path], object]] = {
    "an assistant": _json("generation_config.json", assistant_model="evil/model", custom_generate="evil/code"),
    "a quantizer": _json("config.json", quantization_config={"quant_method": "evil"}),
    "an architecture": _json("config.json", architectures=["__import__", "Evil"]),
    "an architecture of no kind": _json("config.json", architectures={"a": 7}),
    "code": _json("config.json", auto_map={"AutoConfig": "evil/m--c.C"}, model_type="evil", name_or_path="evil/m"),
    "unknown keys": _json("config.json", draft="evil/model", nested={"a": ["evil/model"]}),
    "a pickled tokenizer.model": lambda folder: (folder / "tokenizer.model").write_bytes(pickle.dumps(os.getcwd)),
    "a pickle of text": _raw("tokenizer.model", b"cos\nsystem\n(S'touch harm'\ntR."),
    "an archive named vocab.txt": _raw("vocab.txt", b"PK\x03\x04\x00\x00"),
    "a program named merges.txt": _raw("merges.txt", b"\x7fELF\x02\x01\x01\x00"),
    "a tokenizer with code": _json("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.E", "evil.E"]}),
    **{f"a tokenizer: {name}": _bomb(changes) for name, changes in list(TOKENIZERS.items())[:24]},
}


def _export(change: Callable[[Path], object], checkpoint: Path) -> Callable[[Path, Path], list[str]]:
    def make(folder: Path, canary: Path) -> list[str]:
        import shutil

        copy = Path(shutil.copytree(checkpoint, folder / checkpoint.name))
        (copy / "evil.py").write_text(CODE.format(str(canary)))
        change(copy)
        if (copy / "tokenizer_config.json").exists():
            _json("tokenizer_config.json", tokenizer_class="GPT2Tokenizer")(copy)
        seal(copy)
        return ["export", "--checkpoint", str(copy), "--output", "exported"]

    return make


# ---- data and other programs' configurations


def _parquet(rows: int, length: int) -> Callable[[Path, Path], list[str]]:
    """A few hundred bytes that stand for gigabytes: one text, `rows` times."""

    def make(folder: Path, canary: Path) -> list[str]:
        words = write_tokenizer(folder / "words", TEMPLATE)
        column = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array(["x" * length]))
        pq.write_table(pa.table({"text": column}), folder / "bomb.parquet", compression="zstd")
        return ["prepare", "--input", "bomb.parquet", "--output", "out", "--tokenizer", str(words), "--workers", "1"]

    return make


def _input(name: str, content: bytes, packed: int = 0) -> Callable[[Path, Path], list[str]]:
    """An input of this content, or of it so many times, packed."""

    def make(folder: Path, canary: Path) -> list[str]:
        words = write_tokenizer(folder / "words", TEMPLATE)
        if packed:
            with gzip.open(folder / name, "wb", 1) as file:
                for _ in range(packed):
                    file.write(content)
        else:
            (folder / name).write_bytes(content)
        return ["prepare", "--input", name, "--output", "out", "--tokenizer", str(words), "--workers", "1"]

    return make


DATA: dict[str, Callable[[Path, Path], list[str]]] = {
    "a text a hundred times": _parquet(100, 80 << 20),
    "a text a thousand times": _parquet(1000, 8 << 20),
    "no Parquet": _input("a.parquet", b"PAR1" + b"\xff" * 100 + b"PAR1"),
    "a cut Parquet": _input("a.parquet", b"PAR1\x15\x04\x15"),
    "nested too deep": _input("a.jsonl", b'{"text": ' + b"[" * 10**6),
    "a line of a gigabyte, packed": _input("a.jsonl.gz", b" " * (1 << 20), packed=1 << 10),
    "packed zeros": _input("a.txt.gz", b"\0" * (1 << 20), packed=1 << 10),
    "half a character": _input("a.jsonl", b'{"text": "\\ud800"}\n'),
    "control characters": _input("a.jsonl", b'{"text": "\x1b[2J\x00"}\n'),
    "a pickle": _input("a.jsonl", pickle.dumps(os.getcwd)),
}


def _migrate(name: str, content: str, origin: str) -> Callable[[Path, Path], list[str]]:
    def make(folder: Path, canary: Path) -> list[str]:
        (folder / name).write_text(content.replace("CANARY", str(canary)))
        return ["migrate", name, "--from", origin, "--output", "migrated.yaml"]

    return make


_PRETRAIN = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 {}\n"
SCRIPTS = {
    "a command": _PRETRAIN.format("--lr $(touch CANARY) --micro-batch-size `touch CANARY`"),
    "a product": "A='x x x x x x x x'\n" + "A=\"$A $A $A $A $A $A $A $A\"\n" * 40 + _PRETRAIN.format("$A"),
    "a thousand names": "A='x x ..'\n" + _PRETRAIN.format("$A " * 20_000),
    "keys without number": _PRETRAIN.format(" ".join(f"--evil-{i} {i}" for i in range(12_000))),
    "a chain": "".join(f"A{i}=\"$A{i - 1}x\"\n" for i in range(1, 5000)) + _PRETRAIN.format("--lr $A4999"),
    "itself": "source run.sh\n. ./run.sh\n" + _PRETRAIN.format(""),
    "braces": _PRETRAIN.format("--lr {1..999999999}"), "a brace of braces": _PRETRAIN.format("{a,b}" * 60),
    "a loop": "while true; do :; done\n" + _PRETRAIN.format(""),
    "a function that calls itself": "f() { f | f & }\nf\n" + _PRETRAIN.format(""),
    "arithmetic": _PRETRAIN.format("--lr $((9**9**9)) --train-iters $((10**999999))"),
    "a heredoc without end": "cat <<EOF\n" * 1000 + _PRETRAIN.format(""),
    "quotes without end": _PRETRAIN.format("--lr \"$(echo '"), "nested substitution": _PRETRAIN.format("$(" * 5000),
    "plugins": _PRETRAIN.format("--plugins evil.py --storage 'pipe:touch CANARY'"),
    "an interpolation": _PRETRAIN.format("--data-path '${oc.env:HOME}'"),
    "control characters": _PRETRAIN.format("--lr $'\\x1b[2J\\nerror: all is well'"),
    "an eval": "eval \"$(echo touch CANARY)\"\n" + _PRETRAIN.format(""),
}  # fmt: skip
TOML = {
    "too deep": "a = " + "[" * 5000 + "]" * 5000, "keys too deep": ".".join("a" * 5000) + " = 1",
    "tables too deep": "[" + ".".join("a" * 5000) + "]\nx = 1", "a huge number": "[training]\nsteps = " + "9" * 10**6,
    "many keys": "[training]\n" + "".join(f"evil_{i} = {i}\n" for i in range(12_000)),
    "a long text": "[model]\nname = \"" + "x" * 10**7 + "\"", "no TOML": "\x00" * 100,
    "plugins": "plugins = [\"evil.py\"]\n[run]\nplugins = [\"evil.py\"]\n[model]\nname = \"llama3\"\nflavor = \"8B\"\n",
    "an interpolation": "[model]\nname = \"${oc.env:HOME}\"\nflavor = [\"${oc.env:HOME}\"]\n",
}  # fmt: skip
YAML = {
    "aliases": "a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n"
                                             for i in range(24)),
    "an object": "a: !!python/object/apply:os.system ['touch CANARY']\n", "too deep": "a: " + "[" * 5000,
    "Jinja": "model_name_or_path: \"{{ lipsum(n=99999999) }}\"\nlearning_rate: \"{{ 'x' * 10 ** 10 }}\"\n",
    "plugins": "plugins: [evil.py]\nrun: {plugins: [evil.py], trackers: [{name: evil}]}\nmodel_name_or_path: x\n",
    "a key with a line": "\"a\\nplugins: [evil.py]\": 1\nmodel_name_or_path: x\n",
    "itself": "includes: [run.yaml]\nmodel_name_or_path: x\n", "a huge number": "learning_rate: " + "9" * 10**6,
}  # fmt: skip


def hostile(kind: str, checkpoint: Path) -> Iterator[Hostile]:
    """The hostile files of a kind."""
    samples, train, dry = ["samples"], ["train", "--nproc-per-node", "1"], ["train", "--dry-run"]
    if kind == "tokenizers that prepare":
        made = {name: _bomb(changes) for name, changes in TOKENIZERS.items()} | FOLDERS
        yield from (Hostile(name, _prepared(change)) for name, change in made.items())
    elif kind in ("tokenizers of chats", "tokenizers that train"):
        verb = samples if kind == "tokenizers of chats" else train
        yield from (Hostile(name, _chat(TEMPLATE, changes, verb)) for name, changes in TOKENIZERS.items())
    elif kind == "templates":
        yield from (
            Hostile(f"{name} in {verb[0]} {verb[-1]}", _chat(template, {}, verb))
            for name, template in TEMPLATES.items()
            for verb in (samples, train, dry)
        )
    elif kind == "folders":
        yield from (Hostile(name, _folder(config)) for name, config in CONFIGS.items())
        yield from (Hostile(name, _folder(GPT2, more)) for name, more in WEIGHTS.items())
    elif kind == "adapters":
        yield from (Hostile(name, _adapter(changes)) for name, changes in ADAPTERS.items())
        yield Hostile("too deep", _adapter({}, b"[" * 10**6))
    elif kind == "exports":
        yield from (Hostile(name, _export(change, checkpoint)) for name, change in EXPORTS.items())
    elif kind == "data":
        yield from (Hostile(name, make) for name, make in DATA.items())
    else:
        scripts = [("run.sh", "megatron_lm", SCRIPTS), ("run.toml", "torchtitan", TOML)]
        for file, origin, texts in [*scripts, ("run.yaml", "llama_factory", YAML)]:
            yield from (Hostile(f"{file}: {name}", _migrate(file, text, origin)) for name, text in texts.items())


KINDS = ("tokenizers that prepare", "tokenizers of chats", "tokenizers that train", "templates", "folders", "adapters",
         "exports", "data", "configurations")  # fmt: skip


# ---- the program


def complaints(case: Hostile, folder: Path, seconds: float = 6 * SECONDS) -> list[str]:
    """What is wrong with the way in which the program meets the files: nothing, where all is well.

    Its seconds are those of computing, which others on the machine do not lengthen; it is killed after more of the
    clock.
    """
    folder.mkdir()
    canary = folder / "executed"
    arguments = case.make(folder, canary)
    out, err, seen = (folder / name for name in ("out.txt", "err.txt", "seen.json"))
    process = forked(_run, (folder, arguments, out, err, seen))
    process.start()
    process.join(seconds)
    found = []
    if process.is_alive():
        kill_session(process)
        found.append(f"still there after {seconds:g} s")
    said = err.read_text(errors="replace") if err.exists() else ""
    text = said + (out.read_text(errors="replace") if out.exists() else "")
    if process.exitcode not in (0, 1):
        found.append(f"exit code {process.exitcode}")
    if canary.exists() or (folder / "weights" / "harm").exists():
        found.append("its code was executed")
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if process.exitcode == 1 and len(errors) != 1:
        found.append(f"{len(errors)} sentences")
    if "Traceback" in text or "panicked" in text or "\x1b[2J" in text:
        found.append("a traceback, or what steers a terminal")
    if seen.exists():
        measured = json.loads(seen.read_text())
        found += [f"{measured['peak'] >> 20} MiB"] if measured["peak"] > BYTES else []
        found += [f"{measured['seconds']:.1f} s of computing"] if measured["seconds"] > SECONDS else []
    return [f"{case.name}: {', '.join(found)}\n{text[-1000:]}"] if found else []


def _run(folder: Path, arguments: list[str], out: Path, err: Path, seen: Path) -> None:
    from crosstrain.cli.main import main

    os.setsid()
    os.environ |= ENVIRONMENT | {"XDG_CACHE_HOME": str(folder / "cache")}
    os.chdir(folder)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    torch.set_num_threads(1)
    sys.argv = [str(ROOT / f"{arguments[0]}.py"), *arguments[1:]]
    try:
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    measured = {"peak": max(u.ru_maxrss for u in usage) << 10, "seconds": sum(u.ru_utime + u.ru_stime for u in usage)}
    seen.write_text(json.dumps(measured))
    os._exit(code)
