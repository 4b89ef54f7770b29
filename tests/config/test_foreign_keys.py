"""Keys of other programs are answered with what they are called here, and a hint is right or not given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from crosstrain_plugins.builtin.commands.migrate.foreign_keys import NONE, UNNEEDED, ForeignKeys, origins

from conftest import ROOT
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.config.run_options import RunOptions
from crosstrain.config.schema import Checker, Component, options_class
from crosstrain.utils.errors import ConfigError

ANSWERS = sorted({answer for origin in origins().values() for answer in origin.answers.maps[0].values()})
LANGUAGE = {"arch", "model_type", "adapter"}  # keys of `model` that no model declares


def members(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint):
        yield from members(inner)


def exists(cls: type, names: list[str]) -> bool:
    """True where an options class, or a component or mapping in it, has an option of that path."""
    hints = get_type_hints(cls, include_extras=True)
    if names[0] not in hints:
        return False
    if len(names) == 1:
        return True
    for hint in members(hints[names[0]]):
        if is_dataclass(hint) and hint is not Component and exists(hint, names[1:]):
            return True
        if get_args(hint)[:1] == (Component,) and any(exists(c, names[1:]) for c in options(get_args(hint)[1])):
            return True
    return False


def options(kind: str) -> list[type]:
    return [options_class(kind, registry.get(kind, name)) for name in registry.names(kind)]


@pytest.mark.parametrize("answer", [a for a in ANSWERS if not a.startswith((NONE, UNNEEDED))])
def test_every_counterpart_is_an_option(answer: str) -> None:
    section, *names = answer.partition(":")[0].split(".")
    if section == "run":
        assert exists(RunOptions, names)
    elif section == "datasets":
        assert names[0] == "NAME"
        assert any(exists(cls, names[1:]) for cls in options("dataset"))
    else:
        assert section == "model"
        adapter = names[0] == "adapter" and (len(names) == 1 or any(exists(c, names[1:]) for c in options("adapter")))
        assert adapter or names[0] in LANGUAGE or any(exists(cls, names) for cls in options("model"))


def test_the_lists() -> None:
    files = sorted((ROOT / "configs" / "foreign_keys").glob("*.yaml"))
    assert len(files) == 7
    documents = [yaml.safe_load(path.read_text()) for path in files]
    assert sum(len(document["keys"]) for document in documents)
    for document in documents:
        for key, answer in document["keys"].items():
            assert re.fullmatch(r"[a-z0-9_]+", key), key
            assert re.fullmatch(r"(none|unneeded): \S.*|(run|model|datasets)\.[\w.]+(: \S.*)?", answer), (key, answer)


PROJECT = {
    "model": {"arch": "gpt2"},
    "datasets": {"mine": {"name": "text", "path": "data", "seq_length": 8}},
    "run": {"output_dir": "out", "max_iters": 1},
}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("run.lr=1", "run.lr: unknown key; Megatron-LM and torchtitan use this name for run.init_lr"),
        ("run.lr_decay_style=cosine", "run.lr_decay_style: unknown key; Megatron-LM uses this name for run.lr_sched"),
        ("run.evaluate=true", "LAVIS has this setting, but it is not needed here: use the command crosstrain evaluate"),
        ("run.save_steps=5", "Hugging Face's Trainer uses this name for run.save_interval"),
        ("run.per_device_train_batch_size=5", "uses this name for run.micro_batch_size"),
        ("run.train_micro_batch_size_per_gpu=5", "DeepSpeed uses this name for run.micro_batch_size"),
        ("run.runner={name: megatron, expert_model_parallel_size: 2}", "uses this name for run.runner.expert_parallel"),
        ("model.freeze_vit=true", "LAVIS uses this name for model.vision.freeze"),
        ("run.resume_ckpt_load_dir=x", "LAVIS uses this name for run.resume_from"),
        (
            "run.gradient_accumulation_steps=2",
            "DeepSpeed and Hugging Face's Trainer use this name for run.accum_grad_iters",
        ),
        ("run.--clip-grad=1", "Megatron-LM uses this name for run.grad_norm_clip"),
        ("run.max_iter=5", "unknown key; did you mean run.max_iters?"),
        ("run.weight-decay=0.1", "unknown key; did you mean run.weight_decay?"),
        ("run.anything=5", "unknown key; known: "),
        (
            "datasets.mine.packing=true",
            "unknown key; other components have it, this one has only: split, val, test, path, seq_length",
        ),
        ("run.packing=true", "Hugging Face's Trainer use this name for datasets.NAME.packing"),
        (
            "run.eval_step=5",
            "unknown key; did you mean eval_steps? Hugging Face's Trainer uses this name for run.eval_int",
        ),
    ],
)
def test_what_an_error_says(tmp_path: Path, option: str, said: str) -> None:
    project = tmp_path / "project.yaml"
    project.write_text(yaml.safe_dump(PROJECT))
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(project, [option])


def test_all_keys_of_a_file_are_answered_at_once(tmp_path: Path) -> None:
    project = tmp_path / "project.yaml"
    foreign = {"lr": 1.0, "train_iters": 5, "clip_grad": 1.0, "bf16": True, "tensor_model_parallel_size": 2}
    project.write_text(yaml.safe_dump(PROJECT | {"run": PROJECT["run"] | foreign}))
    with pytest.raises(ConfigError) as failed:
        load_config(project, [])
    assert all(ForeignKeys().of_key(key) in str(failed.value) for key in foreign)


def judged() -> dict[tuple[str, str], str]:
    """Return the counterparts in foreign_keys.txt, judged from each program's documentation, by program and key."""
    found, program = {}, ""
    for line in (Path(__file__).parent / "foreign_keys.txt").read_text().splitlines():
        if line.startswith("["):
            program = line.strip("[]")
        elif not line.startswith("#"):
            key, counterpart = line.split()
            found[program, key] = counterpart
    return found


def test_the_counterparts_of_keys_of_seven_programs() -> None:
    """No hint may be wrong; a key that is here under the same name needs none."""
    by_name = {origin.name: origin for origin in origins().values()}
    wrong, silent = [], []
    for (program, key), counterpart in judged().items():
        answer = by_name[program].answers.get(key)
        if answer is None:
            silent += [key] if counterpart.rpartition(".")[2] != key else []
        elif ("-" if answer.startswith((NONE, UNNEEDED)) else answer.partition(":")[0]) != counterpart:
            wrong.append((program, key, answer))
    assert len(judged()) >= 500
    assert wrong == []
    assert len(silent) <= 0.05 * len(judged())


@pytest.mark.slow
def test_a_misspelled_key_of_another_program_gets_its_own_counterpart_or_none() -> None:
    run = [f.name for f in fields(RunOptions)]
    checker = Checker(".".join)
    wrong = []
    for (_, key), counterpart in judged().items():
        middle = len(key) // 2
        typos = {key[:middle] + key[middle + 1 :], key[:middle] + key[middle] * 2 + key[middle + 1 :]}
        for typo in typos - {key, *run} if len(key) > 5 else ():  # shorter ones are as near to others
            with pytest.raises(ConfigError) as failed:
                checker.unknown_key(("run", typo), run)
            said = str(failed.value).partition("unknown key; ")[2]
            if not said.startswith((f"did you mean {key}?", f"did you mean {counterpart}?", "known: ")):
                wrong.append((key, said))
    assert wrong == []


@pytest.mark.parametrize("invented", ["colour", "weights_path", "gpus", "patience", "use_magic", "nodes", "verbose"])
def test_an_invented_key_gets_no_hint(invented: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown key; known: "):
        Checker(".".join).unknown_key(("run", invented), [f.name for f in fields(RunOptions)])
