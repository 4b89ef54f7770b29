"""The vision-language model: what it computes, what it trains, where its weights come from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crosstrain_plugins.builtin.datasets.vision.conversations import ConversationEncoder
from torch.distributed.tensor import DTensor

from conftest import Run
from crosstrain.config.load import load_config
from crosstrain.data.shuffle import sample_index
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.engine.build import make_model
from crosstrain.engine.runner import Runner
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.training.preflight import preflight
from crosstrain.utils.errors import CheckpointError, ConfigError, DataError
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train
from fixtures_training import TOLERANCE, relative, stored
from fixtures_vision import MODEL, OPEN, build, mixed_project, options, sample, shapes, write_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project on a few rendered images."""
    folder = tmp_path_factory.mktemp("sight")
    path = write_project(folder / "project.yaml", shapes(folder))
    prepare_data(load_config(path))
    return path


def seeing(project: Path, *given: str) -> Runner:
    """A model whose images count as much as its words; at first what comes of them is small."""
    runner = build(project, *given)
    with torch.no_grad():
        for name, p in runner.model.weights.parameters().items():
            if p.ndim > 1 and ("crossattention" in name or name == "language_projection.weight"):
                p.mul_(20)
    return runner


def test_a_mixed_batch_has_the_loss_of_its_samples_one_by_one(project: Path) -> None:
    runner = seeing(project)
    samples = [sample(images, length, i) for i, (images, length) in enumerate([(0, 5), (1, 9), (3, 14), (0, 20)])]
    with runner.evaluating():
        together = runner.evaluate(ConversationEncoder.collate(samples)).item()
        single = [runner.evaluate(ConversationEncoder.collate([s])).item() for s in samples]
    assert together == pytest.approx(sum(single), rel=1e-6)
    assert len({round(loss / 5, 3) for loss in single}) == 4


def test_images_matter_and_each_stands_at_its_place(project: Path) -> None:
    runner = seeing(project)
    one = sample(2, 8, 0)
    swapped = one | {"pixel_values": one["pixel_values"][::-1].copy()}
    with runner.evaluating():
        losses = [runner.evaluate(ConversationEncoder.collate([s])).item() for s in (one, swapped, one)]
    assert losses[0] == losses[2]
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0]


def test_packed_conversations_are_computed_as_single_ones(project: Path) -> None:
    runner = seeing(project, *options({"model.language_model.model.attention": "eager"}))
    dataset = open_split(load_config(project), "train")
    images, annotation = next(read for read in map(dataset.read, range(40)) if len(read[1]["questions"]) > 8)
    conversations = dataset.text_processor(annotation, 1, np.random.default_rng(0))
    assert len(conversations) > 8
    pixels = {"pixel_values": dataset.encoder.process(images, np.random.default_rng(0))}
    packed = dataset.encoder.sample(conversations) | pixels
    single = [dataset.encoder.sample([c]) | pixels for c in conversations]
    assert len(packed["input_ids"]) < 0.75 * sum(len(s["input_ids"]) for s in single)
    with runner.evaluating():
        whole = runner.evaluate(ConversationEncoder.collate([packed])).item()
        apart = [runner.evaluate(ConversationEncoder.collate([s])).item() for s in single]
        fused = seeing(project).evaluate(ConversationEncoder.collate([packed, single[0]])).item()
    assert whole == pytest.approx(sum(apart), rel=1e-6)
    assert fused == pytest.approx(whole + apart[0], rel=1e-5)


def test_images_without_placeholders_are_refused(project: Path) -> None:
    runner = build(project)
    broken = sample(2, 8, 0)
    broken["input_ids"][0] = 3
    with runner.evaluating(), pytest.raises(DataError, match=r"2 images of 4 query tokens do not fill 7 placeholders"):
        runner.evaluate(ConversationEncoder.collate([broken]))


# ---- what is trained


@pytest.fixture(scope="module")
def projection_only(project: Path) -> Run:
    return train(project, "projection")


def test_by_default_the_projection_alone_is_trained(project: Path, projection_only: Run) -> None:
    runner = build(project, training=True)
    trained = {n for n, p in runner.model.weights.parameters().items() if p.requires_grad}
    assert trained == {"language_projection.weight", "language_projection.bias"}
    assert runner.optimizer is not None
    assert sum(p.numel() for group in runner.optimizer.param_groups for p in group["params"]) == 32 * 32 + 32
    batch = ConversationEncoder.collate([sample(1, 9, 0)])
    runner.compute_loss(batch).backward()
    assert {n for n, p in runner.model.weights.parameters().items() if p.grad is not None} == trained
    moments = {n for n in stored(projection_only.checkpoint(8)) if n.startswith("exp_avg")}
    assert {n.partition("/")[2] for n in moments} == trained
    assert projection_only.column("loss")[-1] < projection_only.column("loss")[0]


def test_frozen_parts_stay_in_eval_mode(project: Path) -> None:
    model = build(project, "model.language_model.freeze=false", training=True).model
    modes = {part: getattr(model, part).training for part in ("vision", "qformer", "projector", "language_model")}
    assert modes == {"vision": False, "qformer": False, "projector": True, "language_model": True}
    assert not any(m.training for m in model.qformer.modules())


def test_parts_have_learning_rates_of_their_own(project: Path) -> None:
    runner = build(project, "model.qformer.freeze=false", "model.qformer.lr_scale=0.1", training=True)
    runner.set_learning_rate(1e-3)
    assert runner.optimizer is not None
    rates = {p: group["lr"] for group in runner.optimizer.param_groups for p in group["params"]}
    for name, p in runner.model.weights.parameters().items():
        if p.requires_grad:
            assert rates[p] == pytest.approx(1e-3 if name.startswith("language_projection") else 1e-4), name


def test_parts_have_a_precision_of_their_own(project: Path) -> None:
    seen: dict[str, torch.dtype] = {}
    runner = build(project, "model.vision.precision=bf16")
    runner.model.vision.blocks[0].mlp.fc1.register_forward_hook(lambda m, i, o: seen.update(vision=o.dtype))
    runner.model.projector.register_forward_hook(lambda m, i, o: seen.update(projector=o.dtype))
    with runner.evaluating():
        runner.evaluate(ConversationEncoder.collate([sample(1, 9, 0)]))
    assert seen == {"vision": torch.bfloat16, "projector": torch.float32}


def test_parts_have_gradient_checkpointing_of_their_own(project: Path) -> None:
    plain = build(project, *options(OPEN), training=True)
    kept = build(project, *options(OPEN), "model.vision.gradient_checkpointing=full", training=True)
    assert "forward" in vars(kept.model.vision.blocks[0])
    assert "forward" not in vars(kept.model.language_model.blocks()[0])
    for runner in (plain, kept):
        runner.model.eval()  # dropout draws elsewhere
        runner.compute_loss(ConversationEncoder.collate([sample(1, 9, 0)])).backward()
    for name, p in plain.model.weights.parameters().items():
        assert torch.allclose(p.grad, kept.model.weights.parameters()[name].grad, atol=1e-6), name


# ---- the same under every runner


def mixed(project: Path) -> list[str]:
    """Options that open every part."""
    return [*options(OPEN), "model.language_model.lr_scale=0.5", "run.max_iters=6"]


@pytest.fixture(scope="module")
def everything(project: Path) -> Run:
    run = train(project, "everything@1", *mixed(project))
    assert run.column("loss")[-1] < 0.95 * run.column("loss")[0]
    return run


RUNNERS = ["ddp@2", "fsdp@2", "zero1@2", "zero2@2", "zero3@2"]


@pytest.mark.parametrize("name", mostly_slow(RUNNERS, []))
def test_every_runner_trains_all_parts_alike(project: Path, everything: Run, name: str) -> None:
    runner, _, size = name.partition("@")
    run = train(project, f"everything_{name}", *mixed(project), f"run.runner={runner}", size=int(size))
    assert relative(run.column("loss"), everything.column("loss")) < TOLERANCE
    assert relative(run.column("grad_norm"), everything.column("grad_norm")) < TOLERANCE


@pytest.mark.parametrize("name", mostly_slow(RUNNERS, []))
def test_every_runner_trains_the_projection_alike(project: Path, projection_only: Run, name: str) -> None:
    runner, _, size = name.partition("@")
    run = train(project, f"projection_{name}", f"run.runner={runner}", size=int(size))
    assert relative(run.column("loss"), projection_only.column("loss")) < TOLERANCE


def kept(project: str, given: tuple[str, ...]) -> tuple[set[str], set[str], int]:
    """After a forward and backward: what has gradients, what has optimizer state, and numbers in that state here."""
    trainer = make_trainer(project, given)
    runner, micro = trainer.runner, next(trainer.batches())
    runner.forward_backward(micro, trainer._agree(micro)[0])
    gradients, state = runner.held.gradients(), [s for s in runner.held.shards() if s.kind.startswith("exp_avg")]
    moments = [v for held in runner.optimizer.state.values() for v in held.values() if v.ndim]
    counted = sum((v.to_local() if isinstance(v, DTensor) else v).numel() for v in moments)
    runner.optimizer_step()
    trainer.hooks.call("close")
    runner.close()
    return {s.name for s in gradients}, {s.name for s in state if s.pieces}, counted


@pytest.mark.parametrize("name", mostly_slow(RUNNERS, []))
def test_frozen_parts_have_neither_gradients_nor_state(project: Path, name: str) -> None:
    runner, _, size = name.partition("@")
    given = (f"run.output_dir={project.parent}/kept_{name}", f"run.runner={runner}")
    trained = {"language_projection.weight", "language_projection.bias"}
    ranks = run_ranks(int(size), kept, str(project), given)
    assert set().union(*(gradients for gradients, _, _ in ranks)) == trained
    assert set().union(*(state for _, state, _ in ranks)) == trained
    most = 2 * (32 * 32 + 32) * (1 if name != "ddp@2" else 2)
    assert sum(numbers for _, _, numbers in ranks) <= most + 2 * 64, "two moments, shared; and what fills up"


@pytest.fixture(scope="module")
def mixed_images(tmp_path_factory: pytest.TempPathFactory, project: Path) -> tuple[Path, Run]:
    """A project whose samples have no image, one, or three, and what comes of it on one rank."""
    folder = tmp_path_factory.mktemp("mixed")
    path = mixed_project(folder, project.parent / "shapes" / "tokenizer")
    return path, train(path, "one", *mixed(path))


@pytest.mark.parametrize("name", mostly_slow(RUNNERS, []))
def test_a_rank_whose_batch_is_text_alone_takes_part(mixed_images: tuple[Path, Run], name: str) -> None:
    path, one = mixed_images
    config = load_config(path)
    dataset = open_split(config, "train")
    first = [sample_index(config.run.seed, n, len(dataset)) % 3 for n in range(2 * 6)]
    alone = [(a == 0) != (b == 0) for a, b in zip(first[::2], first[1::2], strict=True)]
    assert any(alone), "no rank was ever the only one without an image"
    runner, _, size = name.partition("@")
    run = train(path, name, *mixed(path), f"run.runner={runner}", size=int(size))
    assert relative(run.column("loss"), one.column("loss")) < TOLERANCE
    assert relative(run.column("grad_norm"), one.column("grad_norm")) < TOLERANCE


# ---- sizes and mistakes


SOURCES = (
    "pretrained", "vision.pretrained", "qformer.pretrained", "projector.pretrained", "language_model.model.pretrained",
)  # fmt: skip
FROM_NOTHING = options({f"model.{key}": None for key in SOURCES})


def parameters(project: str) -> tuple[dict[str, int], dict[str, int]]:
    """Parameters of each part of a project's model, all and those that are trained."""
    with parameters_on_meta():
        model = make_model(load_config(project, FROM_NOTHING))
    every: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for name, p in model.weights.parameters().items():
        count = model.weights.logical_shape(name, p.shape).numel()
        every[name.partition(".")[0]] += count
        trained[name.partition(".")[0]] += count * p.requires_grad
    return every, +trained


def test_the_first_stage_trains_the_projection_between_what_blip2_and_qwen_are() -> None:
    from transformers import Blip2Config, Blip2ForConditionalGeneration, OPTConfig

    every, trained = parameters("projects/blip2_qwen7b_align.yaml")
    with torch.device("meta"):
        theirs = Blip2ForConditionalGeneration(Blip2Config(text_config=OPTConfig(num_hidden_layers=1)))
    # transformers' has a bias of the keys too, which changes nothing.
    assert every["vision_model"] == sum(p.numel() for p in theirs.vision_model.parameters()) - 39 * 1408
    assert every["qformer"] == sum(p.numel() for p in theirs.qformer.parameters())
    assert every["query_tokens"] == theirs.query_tokens.numel()
    assert every["language_model"] == 7_615_616_512
    assert trained == {"language_projection": 768 * 3584 + 3584}


@pytest.mark.slow
def test_the_second_stage_trains_the_qformer_and_adapters_too() -> None:
    every, trained = parameters("projects/blip2_qwen7b_instruct.yaml")
    width, mlp, keys = 3584, 18944, 512
    maps = [(width, width), (width, keys), (width, keys), (width, width), (width, mlp), (width, mlp), (mlp, width)]
    assert trained["language_model"] == 28 * 16 * sum(map(sum, maps))
    assert trained["qformer"] == every["qformer"]
    assert trained.keys() == {"language_model", "language_projection", "qformer", "query_tokens"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model.vision.encoder": "vit_tinny"}, "timm has no model vit_tinny"),
        ({"model.vision.encoder": "resnet18", "model.vision.mlp_ratio": None}, "timm cannot make resnet18"),
        ({"model.qformer.num_attention_heads": 5}, "5 does not divide hidden_size=32"),
        ({"model.vision.lr_scale": 0}, "lr_scale: expected a number above 0, got 0"),
    ],
)
def test_mistakes_are_one_sentence(project: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_model(load_config(project, options(given)))


@pytest.mark.parametrize("key", ["model.vision", "datasets.images.vis_processor.train"])
def test_images_of_another_size_are_refused_before_a_run(project: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=r"images have \d+ x \d+ pixels, but the model takes \d+ x \d+: "):
        preflight(load_config(project, [f"{key}.image_size=32"]), 1)


@pytest.mark.slow
def test_another_language_model_of_the_registry_does(project: Path) -> None:
    gpt2 = {"name": "gpt2", "vocab_size": 64, "n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 256}
    config = json.loads(json.dumps(MODEL)) | {"language_model": {"model": gpt2, "freeze": False}}
    import yaml

    other = project.with_name("gpt2.yaml")
    other.write_text(yaml.safe_dump(yaml.safe_load(project.read_text()) | {"model": config}))
    run = train(other, "gpt2", "run.max_iters=4")
    assert run.column("loss")[-1] < run.column("loss")[0]
    with pytest.raises(CheckpointError, match="check that `model` is the model that was trained"):
        build(project, checkpoint=run.checkpoint(4))
