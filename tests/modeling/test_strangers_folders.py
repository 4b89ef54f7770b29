"""Folders that are named as pretrained: other programs' are told apart, impossible sizes and files are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.config.pretrained_folder import pretrained_folder
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.training.preflight import preflight
from crosstrain.utils.errors import CheckpointError, ConfigError, DataError


def deepspeed(folder: Path) -> None:
    (folder / "global_step100").mkdir()
    torch.save({}, folder / "global_step100" / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step100")


def deepspeed_with_its_program(folder: Path) -> None:
    deepspeed(folder)
    (folder / "zero_to_fp32.py").touch()


def fsdp(folder: Path) -> None:
    (folder / "__0_0.distcp").touch()
    (folder / ".metadata").write_bytes(b"\x80")


def fsdp_of_accelerate(folder: Path) -> None:
    (folder / "pytorch_model_fsdp_0").mkdir()
    fsdp(folder / "pytorch_model_fsdp_0")
    torch.save({}, folder / "optimizer.bin")
    torch.save({}, folder / "scheduler.pt")


def fsdp_in_one_file(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model_fsdp.bin")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (deepspeed, "DeepSpeed.*zero_to_fp32.py"), (deepspeed_with_its_program, "DeepSpeed.*zero_to_fp32.py"),
        (lambda folder: (deepspeed(folder), (folder / "config.json").write_text("{}")), "DeepSpeed.*zero_to_fp32.py"),
        (fsdp, "torch.distributed.checkpoint, as FSDP saves it.*accelerate merge-weights"),
        (fsdp_of_accelerate, "torch.distributed.checkpoint, as FSDP saves it.*accelerate merge-weights"),
        (fsdp_in_one_file, "FSDP in one pickle file.*SHARDED_STATE_DICT"),
    ],
)  # fmt: skip
def test_sharded_checkpoints_of_other_programs_say_how_to_convert_them(
    make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        pretrained_folder(str(tmp_path))
    if (tmp_path / "global_step100").exists():  # the step's own folder says the same
        with pytest.raises(CheckpointError, match=said):
            pretrained_folder(str(tmp_path / "global_step100"))


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "num_hidden_layers",
                                 "hidden_size", "num_key_value_heads", "intermediate_size"])  # fmt: skip
@pytest.mark.parametrize("value", ["-1", "0", "1e300", "-1e-3", "1000000000000"])
def test_impossible_sizes_are_refused_at_any_depth(key: str, value: str, tmp_path: Path) -> None:
    for text in (f'{{"{key}": {value}}}', f'{{"a": [{{"text_config": {{"x": 1, "{key}"  : {value}, "y": 2}}}}]}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"{key} is {value}; expected 1 to \d+$"):
            pretrained_folder(str(tmp_path))


def test_usual_sizes_are_taken(tmp_path: Path) -> None:
    usual = {"n_layer": 96, "hidden_size": 12288, "max_position_embeddings": 10_485_760, "num_experts": 0,
             "pad_token_id": -1, "num_key_value_heads": None, "num_nextn_predict_layers": 0, "n_inner": None,
             "attn_layers": [-1], "num_hidden_layers_note": -1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(usual))
    assert pretrained_folder(str(tmp_path)) == tmp_path


def test_a_configuration_that_is_no_small_file_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    with open(config, "wb") as file:
        file.truncate(900 << 20)
    with pytest.raises(CheckpointError, match="943718400 bytes exceed the limit of 4194304"):
        pretrained_folder(str(tmp_path))
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(CheckpointError, match="not a regular file"):
        pretrained_folder(str(tmp_path))


def test_a_tokenizer_with_more_ids_than_the_model_fails_the_dry_run(
    workspace: Workspace, tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 500)
    made = {"datasets.tiny.path": "none", "datasets.tiny.prepare.input": tmp_path / "a.txt", "model.vocab_size": 290}
    options: list[Any] = [f"{key}={value}" for key, value in made.items()]
    config = load_config(workspace.project, [*options, f"datasets.tiny.prepare.tokenizer={tokenizer}"])
    with pytest.raises(ConfigError, match=r"vocab_size of 290 is too small for the 300 IDs"):
        preflight(config, 1, dry=True)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    chats = {"name": "chat", "path": str(tmp_path / "chats.jsonl"), "tokenizer": str(tokenizer), "seq_length": 16}
    project = workspace.config | {"datasets": {"chats": chats}}
    with pytest.raises(ConfigError, match="vocab_size of 290 is too small"):
        preflight(load_config(project, ["model.vocab_size=290"]), 1, dry=True)


def test_an_id_beyond_all_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    document = json.loads((tokenizer / "tokenizer.json").read_text())
    document["model"]["vocab"]["zz"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="has the ID 4000000000; at most 16777216"):
        load_tokenizer(tmp_path / "tokenizer.json")
