"""BLIP-2's first stage: its losses are those of an implementation that follows the paper sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from conftest import Run
from crosstrain import DataError, registry
from crosstrain.config.load import load_config
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.engine.build import make_model
from fixtures_ranks import mostly_slow, train
from fixtures_training import TOLERANCE, relative
from fixtures_vision import MODEL, OPEN, options, shapes, write_project

VISION = MODEL["vision"] | {"freeze": False}
QFORMER = MODEL["qformer"] | {"freeze": False, "dropout": 0.0}
CAPTIONS = {"name": "captions"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage1")
    data = shapes(folder) | {"text_processor": {"train": CAPTIONS, "eval": CAPTIONS}, "image_tokens": 1}
    path = write_project(folder / "project.yaml", data, max_iters=6, micro_batch_size=4, global_batch_size=8)
    written = {"arch": "blip2", "vision": VISION, "qformer": QFORMER, "vocab_size": 64, "embed_dim": 16}
    plain: dict[str, Any] = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(plain | {"model": written}))
    prepare_data(load_config(path))
    return path


@pytest.fixture(scope="module")
def model(project: Path) -> Any:
    built: Any = make_model(load_config(project))
    torch.manual_seed(0)
    for name, parameter in built.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.2)
    built.log_temperature.data.fill_(-1.0)
    return built.train()


def batch_of(project: Path, count: int) -> dict[str, Tensor]:
    data = open_split(load_config(project), "train")
    return data.collate([data.get(number, np.random.default_rng(number)) for number in range(count)])


def smoothed(logits: Tensor, target: int, smoothing: float) -> Tensor:
    logs = logits.log_softmax(-1)
    return -(1 - smoothing) * logs[target] - smoothing * logs.mean()


def as_in_the_paper(model: Any, batch: dict[str, Tensor], draws: list[Tensor]) -> dict[str, Tensor]:
    """Contrast, matching and captioning, one image and one text at a time. draws: negatives of texts and images."""
    count, smoothing = len(batch["labels"]), model.options.label_smoothing
    captions = [row[row >= 0] for row in batch["labels"]]
    patches = [model.vision(image[None]).float() for image in batch["pixel_values"]]
    queries = model.queries.query_tokens
    number = queries.shape[1]

    def text(caption: Tensor, first: int) -> Tensor:
        ids = torch.cat([torch.tensor([first]), caption])
        return (model.words.weight[ids] + model.places.weight[: len(ids)])[None]

    seen = [model.qformer(queries, encoder_hidden_states=p).last_hidden_state[0] for p in patches]
    read = [model.qformer(text(c, model.first_token), 0).last_hidden_state[0, 0] for c in captions]
    images = [torch.nn.functional.normalize(model.image_projection(s), dim=-1) for s in seen]
    texts = [torch.nn.functional.normalize(model.text_projection(r), dim=-1) for r in read]
    near = torch.stack([torch.stack([(i @ t).max() for t in texts]) for i in images]) / model.log_temperature.exp()
    contrast = sum(smoothed(near[n], n, smoothing) + smoothed(near[:, n], n, smoothing) for n in range(count))

    def matches(image: int, caption: int) -> Tensor:
        both = torch.cat([queries, text(captions[caption], model.first_token)], 1)
        out = model.qformer(both, number, encoder_hidden_states=patches[image]).last_hidden_state[0, :number]
        return model.matching(out).mean(0)

    other_image, other_text = draws
    pairs = [(n, n, 1) for n in range(count)]
    pairs += [(int(other_image[n]), n, 0) for n in range(count)] + [(n, int(other_text[n]), 0) for n in range(count)]
    assert all(image != caption for image, caption, same in pairs if not same)
    matching = sum(smoothed(matches(image, caption), same, 0.0) for image, caption, same in pairs)

    written = []
    for n, caption in enumerate(captions):
        for length in range(len(caption)):  # predict each token from a Q-Former that has seen only the text before it
            both = torch.cat([queries, text(caption[:length], model.decode_token)], 1)
            mask = torch.ones(1, 1, both.shape[1], both.shape[1], dtype=torch.bool)
            mask[..., :number, number:] = False  # queries do not see the text
            mask[..., number:, number:] = torch.ones(length + 1, length + 1, dtype=torch.bool).tril()
            out = model.qformer(both, number, mask, patches[n]).last_hidden_state[0, -1]
            hidden = model.transform_norm(torch.nn.functional.gelu(model.transform(out)))
            written.append(smoothed(model.words.weight @ hidden + model.word_bias, int(caption[length]), smoothing))
    return {
        "contrast": contrast / (2 * count), "matching": matching / len(pairs),
        "captioning": torch.stack(written).mean(),
    }  # fmt: skip


def test_losses_are_those_of_the_paper(project: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, draws = batch_of(project, 4), []
    draw = torch.multinomial

    def kept(*args: Any, **more: Any) -> Tensor:
        draws.append(draw(*args, **more))
        return draws[-1]

    monkeypatch.setattr(torch, "multinomial", kept)
    torch.manual_seed(1)
    loss = model(**batch)
    monkeypatch.undo()
    theirs = as_in_the_paper(model, batch, [found[:, 0] for found in draws])
    ours = {name: total / count for name, (total, count) in model.take_recorded().items()}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value.item(), rel=1e-6), name
    assert loss.item() == pytest.approx(4 * float(sum(theirs.values())), rel=1e-6)


def test_hard_negatives_are_drawn_more_often(project: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to the softmax of their similarity, and never the true pair."""
    weights: list[Tensor] = []
    draw = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda chance, n: (weights.append(chance), draw(chance, n))[1])
    near = torch.tensor([[9.0, 2.0, 0.0], [1.0, 9.0, 4.0], [0.0, 0.0, 9.0]])
    patches, ids = torch.zeros(3, 5, 32), torch.zeros(3, 2, dtype=torch.long)
    model._match(near, patches, ids, torch.ones_like(ids))
    assert weights[1].diagonal().sum() == 0
    row = near[1].softmax(0)
    assert float(weights[1][1, 2] / weights[1][1, 0]) == pytest.approx(float(row[2] / row[0]), rel=1e-4)
    column = near[:, 1].softmax(0)
    assert float(weights[0][1, 0] / weights[0][1, 2]) == pytest.approx(float(column[0] / column[2]), rel=1e-4)


@pytest.fixture(scope="module")
def alone(project: Path) -> Run:
    return train(project, "one")


@pytest.mark.parametrize("runner", mostly_slow(["ddp", "fsdp", "zero1", "zero3"], []))
def test_runners_train_alike(project: Path, alone: Run, runner: str) -> None:
    two = train(project, runner, f"run.runner={runner}", size=2)
    assert relative(two.column("loss"), alone.column("loss")) < TOLERANCE
    assert alone.column("loss")[-1] < alone.column("loss")[0]


def test_the_second_stage_begins_with_the_first(project: Path, alone: Run) -> None:
    """Its vision model and Q-Former come from a run of the first stage."""
    language = {"model": {"arch": "blip2_qwen", "language_model": MODEL["language_model"]}}
    given = {
        "vision": VISION | {"pretrained": str(alone.folder)}, "qformer": QFORMER | {"pretrained": str(alone.folder)},
    }  # fmt: skip
    plain: dict[str, Any] = yaml.safe_load(project.read_text())
    plain["model"] = language["model"] | given
    plain["datasets"]["images"] |= {"image_tokens": 4}
    path = project.parent / "second.yaml"
    path.write_text(yaml.safe_dump(plain))
    second = train(path, "second", *options(OPEN), "run.init_lr=1e-12", "run.min_lr=0")
    before, after = (
        {key: value for file in run.checkpoint(6).glob("*.safetensors") for key, value in load_file(file).items()}
        for run in (alone, second)
    )
    names = [
        name for name in after if "qformer" in name and name in before and "step" not in name and "exp" not in name
    ]
    assert any("crossattention" in name for name in names)
    for name in names:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-7)


def test_batches_without_an_image_per_sample_are_refused(project: Path, model: Any) -> None:
    batch = batch_of(project, 2)
    with pytest.raises(DataError, match="exactly one image per sample"):
        model(**batch | {"pixel_values": batch["pixel_values"][:1]})
    assert registry.get("model", "blip2").num_targets(batch) == 2
