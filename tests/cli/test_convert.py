"""`crosstrain convert`: every tensor of a BLIP-2 checkpoint of LAVIS arrives, and nothing in it is executed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from crosstrain.config.load import load_config
from crosstrain.data.splits import prepare_data
from crosstrain.engine.build import build_model, make_runner
from fixtures_vision import shapes, write_project

WIDTH, EVA, WORDS, PLACES, QUERIES, FEATURES = 64, 88, 120, 16, 4, 16


def layer(name: str, out: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def published() -> dict[str, torch.Tensor]:
    """Tensors as LAVIS's blip2_pretrained.pth names them, with small sizes."""
    shapes: dict[str, tuple[int, ...]] = {
        "query_tokens": (1, QUERIES, WIDTH), "visual_encoder.cls_token": (1, 1, EVA),
        "visual_encoder.pos_embed": (1, 1 + 4, EVA), "visual_encoder.patch_embed.proj.weight": (EVA, 3, 8, 8),
        "visual_encoder.patch_embed.proj.bias": (EVA,), "temp": (),
        "Qformer.bert.embeddings.word_embeddings.weight": (WORDS + 1, WIDTH),
        "Qformer.bert.embeddings.position_embeddings.weight": (PLACES, WIDTH),
        "Qformer.cls.predictions.bias": (WORDS + 1,),
    }  # fmt: skip
    for n in range(2):
        block = f"visual_encoder.blocks.{n}"
        shapes |= norm(f"{block}.norm1", EVA) | norm(f"{block}.norm2", EVA)
        shapes |= {f"{block}.attn.q_bias": (EVA,), f"{block}.attn.v_bias": (EVA,)}
        shapes |= {f"{block}.attn.qkv.weight": (3 * EVA, EVA)} | layer(f"{block}.attn.proj", EVA, EVA)
        shapes |= layer(f"{block}.mlp.fc1", 2 * EVA, EVA) | layer(f"{block}.mlp.fc2", EVA, 2 * EVA)
        bert = f"Qformer.bert.encoder.layer.{n}"
        for kind in ("attention", "crossattention") if n % 2 == 0 else ("attention",):
            source = EVA if kind == "crossattention" else WIDTH
            shapes |= layer(f"{bert}.{kind}.self.query", WIDTH, WIDTH)
            shapes |= layer(f"{bert}.{kind}.self.key", WIDTH, source)
            shapes |= layer(f"{bert}.{kind}.self.value", WIDTH, source)
            shapes |= layer(f"{bert}.{kind}.output.dense", WIDTH, WIDTH)
            shapes |= norm(f"{bert}.{kind}.output.LayerNorm", WIDTH)
        for ending in ("", "_query"):
            shapes |= layer(f"{bert}.intermediate{ending}.dense", 128, WIDTH)
            shapes |= layer(f"{bert}.output{ending}.dense", WIDTH, 128)
            shapes |= norm(f"{bert}.output{ending}.LayerNorm", WIDTH)
    shapes |= norm("ln_vision", EVA) | norm("Qformer.bert.embeddings.LayerNorm", WIDTH)
    shapes |= layer("Qformer.cls.predictions.transform.dense", WIDTH, WIDTH)
    shapes |= norm("Qformer.cls.predictions.transform.LayerNorm", WIDTH)
    shapes |= layer("vision_proj", FEATURES, WIDTH) | layer("text_proj", FEATURES, WIDTH) | layer("itm_head", 2, WIDTH)
    rng = torch.Generator().manual_seed(0)
    state = {name: torch.rand(shape, generator=rng) + 0.01 for name, shape in shapes.items()}
    state["Qformer.bert.embeddings.position_ids"] = torch.arange(PLACES)[None]
    state["Qformer.cls.predictions.decoder.weight"] = state["Qformer.bert.embeddings.word_embeddings.weight"]
    state["Qformer.cls.predictions.decoder.bias"] = state["Qformer.cls.predictions.bias"]
    return state


def converted(folder: Path, content: Any) -> subprocess.CompletedProcess[str]:
    torch.save(content, folder / "lavis.pth")
    command = ["convert", "--input", str(folder / "lavis.pth"), "--output", str(folder / "out")]
    return subprocess.run([sys.executable, "-m", "crosstrain", *command], capture_output=True, text=True, check=False)


def test_every_tensor_arrives(tmp_path: Path) -> None:
    state = published()
    done = converted(tmp_path, {"model": state, "epoch": 3})
    assert done.returncode == 0, done.stderr
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert f"wrote {len(out)} tensors" in done.stdout
    assert len(out) == len(state) - 3  # without the buffer and the two copies
    data = shapes(tmp_path) | {"image_tokens": 1}
    path = write_project(tmp_path / "project.yaml", data)
    plain = yaml.safe_load(path.read_text())
    folder = str(tmp_path / "out")
    model = {
        "arch": "blip2",
        "pretrained": folder,
        "vocab_size": WORDS,
        "max_text_length": PLACES,
        "embed_dim": FEATURES,
    }
    path.write_text(yaml.safe_dump(plain | {"model": model}))
    config = load_config(path)
    prepare_data(config)
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, None, for_training=True)
    found = {name: p.detach() for name, p in runner.model.weights.parameters().items()}
    assert found.keys() == out.keys()  # the model has no tensor that did not come from the file
    for name, value in out.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    words, of_lavis = found["words.weight"], state["Qformer.bert.embeddings.word_embeddings.weight"]
    torch.testing.assert_close(words[:WORDS], of_lavis[:WORDS])
    torch.testing.assert_close(words[WORDS], of_lavis[101])  # [CLS]
    torch.testing.assert_close(words[WORDS + 1], of_lavis[WORDS])  # [DEC]
    assert found["log_temperature"].exp().item() == pytest.approx(state["temp"].item(), rel=1e-6)
    query = found["qformer.encoder.layer.0.crossattention.attention.key.weight"]
    torch.testing.assert_close(query, state["Qformer.bert.encoder.layer.0.crossattention.self.key.weight"])
    runner.close()


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    done = converted(tmp_path, {"model": published() | {"Qformer.bert.pooler.dense.weight": torch.ones(2)}})
    assert done.returncode == 1
    assert "has unknown tensors: Qformer.bert.pooler.dense.weight" in done.stderr
    assert not (tmp_path / "out").exists()


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    done = converted(
        tmp_path, {"model": published() | {"Qformer.cls.predictions.decoder.bias": torch.zeros(WORDS + 1)}}
    )
    assert done.returncode == 1
    assert "should be tied" in done.stderr


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["EVIL"],)


def test_nothing_in_the_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    done = converted(tmp_path, {"model": Evil()})
    assert done.returncode == 1
    assert "torch cannot read its tensors safely" in done.stderr
    assert not (tmp_path / "evil").exists()
