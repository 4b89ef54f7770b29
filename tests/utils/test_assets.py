"""What stands beside the weights: a tokenizer's files by name, and never another model's."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from crosstrain.data.tokenizer import cached_folder, load_tokenizer
from crosstrain.utils.assets import MODEL_FILES, TOKENIZER_FILES, copy_files, plain_files
from crosstrain.utils.errors import DataError


def test_the_names_cover_what_transformers_tokenizers_read() -> None:
    import transformers
    from transformers import tokenization_utils_base as base
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    wanted = {base.SPECIAL_TOKENS_MAP_FILE, base.ADDED_TOKENS_FILE, base.TOKENIZER_CONFIG_FILE}
    for name in {name for name in TOKENIZER_MAPPING_NAMES.values() if name}:
        with suppress(ImportError, AttributeError):  # of one that needs a library that is not here
            wanted |= {file for file in getattr(transformers, name).vocab_files_names.values() if file}
    assert len(wanted) > 12
    assert wanted - TOKENIZER_FILES == set()
    assert not TOKENIZER_FILES & MODEL_FILES
    assert not [name for name in TOKENIZER_FILES if name.endswith((".safetensors", ".bin", ".py"))]


def test_only_tokenizer_files_are_copied_and_none_is_replaced(tmp_path: Path) -> None:
    source, folder = tmp_path / "model", tmp_path / "checkpoint"
    source.mkdir(), folder.mkdir()
    for name in ("tokenizer.json", "vocab.json", "config.json", "model.safetensors", "adapter_config.json", "a.py"):
        (source / name).write_text('{"from": "them"}')
    (folder / "vocab.json").write_text("ours")
    copy_files(plain_files(source, TOKENIZER_FILES), folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "tokenizer.json": '{"from": "them"}',
        "vocab.json": "ours",
    }


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder", "device", "large"])
def test_what_is_no_plain_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    source, secret = tmp_path / "tokenizer", tmp_path / "secret"
    source.mkdir()
    secret.write_text("secret")
    path = source / "vocab.txt"
    if kind == "large":
        with open(path, "wb") as file:
            file.truncate((1 << 28) + 1)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": secret, "dangling": source / "nothing", "device": "/dev/zero"}[kind])
    with pytest.raises(DataError, match=f"{path} is "):
        plain_files(source, TOKENIZER_FILES)


def test_links_within_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir(), (tmp_path / "checkpoint").mkdir()
    (blobs / "beef").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/beef")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")
    copy_files(plain_files(snapshot, TOKENIZER_FILES), tmp_path / "checkpoint")
    copies = sorted((tmp_path / "checkpoint").iterdir())
    assert [path.name for path in copies] == ["tokenizer.json", "vocab.json"]
    assert not any(path.is_symlink() for path in copies)


def test_what_has_gone_since_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, folder = tmp_path / "tokenizer", tmp_path / "checkpoint"
    source.mkdir(), folder.mkdir()
    for name in ("tokenizer.json", "merges.txt", "vocab.json"):
        (source / name).write_text("{}")
    found = plain_files(source, TOKENIZER_FILES)
    (source / "merges.txt").unlink()
    (source / "vocab.json").unlink()
    os.mkfifo(source / "vocab.json")
    copy_files(found, folder)
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    assert len(caplog.records) == 2


def test_tokenizers_that_differ_in_their_chat_template_alone_are_cached_apart(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached = []
    for template in ("{{ a }}", "{{ b }}", "{{ a }}"):
        folder = tmp_path / f"model{len(cached)}"
        folder.mkdir()
        copy_files(plain_files(tokenizer, TOKENIZER_FILES), folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        (folder / "model.safetensors").write_text("weights of another model")
        cached.append(cached_folder(load_tokenizer(folder)))
    assert cached[0] == cached[2] != cached[1]
    assert {path.name for path in cached[0].iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert json.loads((cached[1] / "tokenizer_config.json").read_text())["chat_template"] == "{{ b }}"
