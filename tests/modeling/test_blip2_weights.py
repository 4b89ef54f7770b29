"""Weights in and out: Hugging Face's BLIP-2, timm's and Qwen's folders; what is frozen; adapters."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from crosstrain_plugins.builtin.datasets.vision.conversations import ConversationEncoder
from safetensors.torch import load_file, save_file

from conftest import ROOT, Run
from crosstrain.checkpoint.files import Reader
from crosstrain.cli.main import main
from crosstrain.config.load import load_config
from crosstrain.data.splits import prepare_data
from crosstrain.utils.errors import CheckpointError, ConfigError
from fixtures_ranks import mostly_slow, train
from fixtures_shards import jpeg, write_shard
from fixtures_training import HALF_TOLERANCE, TOLERANCE, relative, sized, stored
from fixtures_vision import LANGUAGE, MODEL, build, options, picture, sample, shapes, write_project


def write_blip2(folder: Path) -> Any:
    """A tiny BLIP-2 as transformers itself writes one, with every weight where it matters."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration, OPTConfig

    torch.manual_seed(0)
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8, "initializer_range": 0.2,
    }  # fmt: skip
    qformer = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "encoder_hidden_size": 32,
    }  # fmt: skip
    text = OPTConfig(
        hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=10, word_embed_proj_dim=16
    )
    config = Blip2Config(vision_config=vision, qformer_config=qformer, text_config=text, num_query_tokens=4)
    theirs = Blip2ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2)
    theirs.save_pretrained(folder)
    return theirs


def write_qwen(folder: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in LANGUAGE.items() if k != "name"})).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose parts all start from folders in their original layouts."""
    folder = tmp_path_factory.mktemp("published")
    write_blip2(folder / "blip2")
    write_qwen(folder / "qwen")
    path = write_project(folder / "project.yaml", shapes(folder))
    document = yaml.safe_load(path.read_text())
    model = json.loads(json.dumps(MODEL))
    for part in ("vision", "qformer"):
        model[part]["pretrained"] = str(folder / "blip2")
    model["language_model"]["model"] = {"name": "qwen", "pretrained": str(folder / "qwen")}
    path.write_text(yaml.safe_dump(document | {"model": model}))
    prepare_data(load_config(path))
    return path


@pytest.mark.parametrize("encoder", ["eva_giant_patch14_224", "vit_base_patch16_224"])
def test_features_equal_those_of_transformers_blip2(published: Path, encoder: str) -> None:
    from transformers import Blip2ForConditionalGeneration

    theirs = Blip2ForConditionalGeneration.from_pretrained(published.parent / "blip2").eval()
    ours = build(published, f"model.vision.encoder={encoder}").model
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = theirs.vision_model(images).last_hidden_state
        answered = theirs.qformer(
            query_embeds=theirs.query_tokens.expand(3, -1, -1), encoder_hidden_states=seen
        ).last_hidden_state
        assert (ours.vision(images) - seen).abs().max() < 1e-5
        assert (ours.encode_images(images) - ours.projector(answered)).abs().max() < 1e-5
    assert seen.std() > 0.1, "nothing was compared"


def test_timms_own_folders_are_taken_as_they_are(published: Path, tmp_path: Path) -> None:
    ours = build(published).model.vision
    weights = {name: value.detach().clone() + 0.5 for name, value in ours.named_parameters()}
    (tmp_path / "timm").mkdir()
    save_file(weights, tmp_path / "timm" / "model.safetensors", {"format": "pt"})
    (tmp_path / "timm" / "config.json").write_text(json.dumps({"architecture": "eva_giant_patch14_224"}))
    other = build(published, f"model.vision.pretrained={tmp_path}/timm").model.vision
    assert all(torch.equal(value, weights[name]) for name, value in other.named_parameters())


def test_a_folder_of_another_kind_is_refused(published: Path) -> None:
    with pytest.raises(ConfigError, match=r"qformer\.pretrained: .* is not a run .* or a Hugging Face BLIP-2 folder"):
        build(published, f"model.qformer.pretrained={published.parent}/qwen")
    with pytest.raises(ConfigError, match=r"model\.pretrained: .* is not a run of this model"):
        build(published, f"model.pretrained={published.parent}/blip2")


def test_sizes_are_those_of_the_weights(published: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(published.read_text())
    for part in ("vision", "qformer"):
        document["model"][part] = {"pretrained": str(published.parent / "blip2")}
    (project := tmp_path / "project.yaml").write_text(yaml.safe_dump(document))
    given, found = (build(p).model.weights.parameters() for p in (published, project))
    assert given.keys() == found.keys()
    assert all(torch.equal(given[name], found[name]) for name in given if not name.startswith("language_projection."))
    for key, there in {"vision.image_size": 16, "vision.depth": 2, "qformer.hidden_size": 32}.items():
        with pytest.raises(ConfigError, match=rf"model\.{key}: 28 differs from {there} in .*blip2; set it to {there}"):
            build(project, f"model.{key}=28")
    with pytest.raises(ConfigError, match=r"model\.qformer\.num_query_tokens: 32 differs from 4 in .*; set it to 4"):
        build(project, "model.qformer.num_query_tokens=32")


# ---- what is frozen


@pytest.fixture(scope="module")
def projection(published: Path) -> Run:
    return train(published, "projection")


@pytest.mark.slow
def test_checkpoints_hold_what_is_trained_and_hashes_of_the_rest(published: Path, projection: Run) -> None:
    checkpoint = projection.checkpoint(8)
    parameters = {n for n in stored(checkpoint) if "/" not in n}
    assert parameters == {"language_projection.weight", "language_projection.bias"}
    model = build(published).model
    assert Reader.open(checkpoint).frozen.keys() == model.weights.parameters().keys() - parameters
    tensors = sum(t.numel() * t.element_size() for f in checkpoint.glob("*.safetensors") for t in load_file(f).values())
    assert tensors < 3 * 4 * (32 * 32 + 32) + 100  # weights and two moments in fp32, and steps


@pytest.mark.parametrize("part", ["vision_model", "qformer", "language_model"])
def test_a_changed_frozen_weight_is_refused_by_name(published: Path, projection: Run, part: str) -> None:
    file = published.parent / ("qwen" if part == "language_model" else "blip2") / "model.safetensors"
    kept = file.read_bytes()
    tensors = load_file(file)
    name = {
        "vision_model": "vision_model.encoder.layers.1.self_attn.qkv.bias", "qformer": "query_tokens",
        "language_model": "model.layers.1.mlp.up_proj.weight",
    }[part]  # fmt: skip
    tensors[name].view(-1)[-1] += 1e-3
    try:
        save_file(tensors, file, {"format": "pt"})
        named = {"vision_model": r"vision_model\.blocks\.1\.attn\.v_bias", "qformer": "query_tokens"}
        with pytest.raises(CheckpointError, match=f"{named.get(part, name)} is frozen and differs"):
            build(published, checkpoint=projection.checkpoint(8))
    finally:
        file.write_bytes(kept)


@pytest.mark.parametrize("name", mostly_slow(["ddp@1", "fsdp@2", "zero3@2", "zero1@2"], []))
def test_parts_are_opened_and_closed_again_in_the_middle(published: Path, projection: Run, name: str) -> None:
    runner, _, size = name.partition("@")
    folder = published.parent / f"opened_{name}"
    shutil.copytree(projection.folder, folder)
    longer = ("run.max_iters=12", "run.lr_decay_iters=16", f"run.runner={runner}")
    opened = train(
        published, folder.name, *longer, "model.qformer.freeze=false", "run.resume_optimizer=false", size=int(size)
    )
    trained = {n for n in stored(opened.checkpoint(12)) if "/" not in n}
    assert any(n.startswith("qformer.") for n in trained)
    assert not any(n.startswith("vision_model.") for n in trained)
    before = load_file(published.parent / "blip2" / "model.safetensors")["query_tokens"]
    reader, now = Reader.open(opened.checkpoint(12)), torch.zeros(1, 4, 32)
    from crosstrain.checkpoint.boxes import Shard, whole_pieces

    reader.fill([Shard("param", "query_tokens", (1, 4, 32), whole_pieces(now, (1, 4, 32)))])
    assert not torch.equal(now, before)
    closed = train(published, folder.name, *longer, "run.max_iters=16", "run.lr_decay_iters=16")  # ddp@1, projection
    assert closed.column("step") == list(range(1, 17))
    reader, later = Reader.open(closed.checkpoint(16)), torch.zeros(1, 4, 32)
    reader.fill([Shard("param", "query_tokens", (1, 4, 32), whole_pieces(later, (1, 4, 32)))])
    assert torch.equal(later, now), "frozen again, it stays what it was trained to"


FROZEN = ("vision", "qformer", "language_model")
SIZES = options({f"model.language_model.model.{key}": value for key, value in LANGUAGE.items() if key != "name"})
LOW = tuple(f"model.{part}.precision=bf16" for part in FROZEN)
HALF = (*LOW, *(f"model.{part}.weights=bf16" for part in FROZEN))


@pytest.fixture(scope="module")
def low(published: Path) -> Run:
    return train(published, "low", *LOW)


@pytest.mark.slow
def test_frozen_matrices_kept_in_bf16_compute_the_same_to_the_bit(published: Path, low: Run) -> None:
    half = train(published, "half", *HALF)
    assert half.column("loss") == low.column("loss")
    assert half.column("grad_norm") == low.column("grad_norm")
    ours, theirs = (Reader.open(run.checkpoint(8)) for run in (half, low))
    assert ours.frozen == theirs.frozen, "hashes are of what was published, whatever it is kept in"
    longer = ("run.max_iters=9", "run.lr_decay_iters=9")
    shutil.copytree(low.folder, published.parent / "low_then_half")
    crossed = train(published, "half", *LOW, *longer), train(published, "low_then_half", *HALF, *longer)
    assert crossed[0].column("loss") == crossed[1].column("loss")
    model, whole = build(published, *HALF).model, build(published, *LOW).model
    kinds = Counter(p.dtype for p in model.parameters())
    assert kinds[torch.bfloat16] > 20
    kept, before = (sum(p.numel() * p.element_size() for p in m.parameters()) for m in (model, whole))
    assert kept < 0.65 * before, "embeddings, which are a larger share of so small a model, stay in fp32"
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", mostly_slow(["ddp@2", "fsdp@2", "zero1@2", "zero2@2", "zero3@2"], []))
def test_every_runner_keeps_frozen_matrices_in_bf16(published: Path, low: Run, name: str) -> None:
    runner, _, size = name.partition("@")
    whole = train(published, f"low_{name}", *LOW, f"run.runner={runner}", size=int(size))
    given = (*HALF, f"run.runner={runner}")
    run = train(published, f"half_{name}", *given, size=int(size))
    for column in ("loss", "grad_norm"):
        assert run.column(column) == whole.column(column), "they are multiplied in bf16 either way"
    # What ranks add up in another order is rounded to bf16 in the layers that follow.
    assert relative(run.column("loss"), low.column("loss")) < HALF_TOLERANCE
    assert Reader.open(run.checkpoint(8)).frozen == Reader.open(low.checkpoint(8)).frozen
    again = train(published, f"half_{name}", *given, "run.max_iters=10", "run.lr_decay_iters=10", size=int(size))
    assert again.column("step") == list(range(1, 11))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("model.vision.weights=bf16", "weights in bf16 need precision: bf16"),
        ("model.projector={weights: bf16, precision: bf16}", "trained weights are kept in fp32"),
    ],
)
def test_weights_are_kept_in_less_only_where_it_changes_nothing(published: Path, given: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build(published, given)


QFORMER, LANGUAGE_MODEL = "model.qformer.freeze=false", "model.language_model.freeze=false"


@pytest.fixture(scope="module")
def other_parts(published: Path, projection: Run) -> Run:
    """Steps of the projection alone, of the Q-Former too, and of the language model in its place, on one rank."""
    folder = published.parent / "other@1"
    shutil.copytree(projection.folder, folder)
    train(published, folder.name, *UNTIL_12, QFORMER, "run.resume_optimizer=false")
    return train(published, folder.name, *UNTIL_16, LANGUAGE_MODEL, "run.resume_optimizer=false")


UNTIL_12 = ("run.max_iters=12", "run.lr_decay_iters=16")
UNTIL_16 = ("run.max_iters=16", "run.lr_decay_iters=16")
RING = ["ddp@2", "zero3@2", "fsdp@2", "zero1@2", "zero2@2", "ddp@2"]


@pytest.mark.parametrize("runners", mostly_slow(list(itertools.pairwise(RING)), []), ids="-".join)
def test_other_parts_are_trained_under_another_runner(
    published: Path, projection: Run, other_parts: Run, runners: tuple[str, str]
) -> None:
    first, then = runners
    folder = published.parent / f"{first}_{then}"
    shutil.copytree(projection.folder, folder)
    for settings, name in (((*UNTIL_12, QFORMER), first), ((*UNTIL_16, LANGUAGE_MODEL), then)):
        runner, _, size = name.partition("@")
        given = (*settings, "run.resume_optimizer=false", f"run.runner={runner}")
        run = train(published, folder.name, *given, size=int(size))
    assert run.column("step") == list(range(1, 17))
    assert relative(run.column("loss"), other_parts.column("loss")) < TOLERANCE
    assert relative(run.column("grad_norm"), other_parts.column("grad_norm")) < TOLERANCE
    for step in (12, 16):
        ours, theirs = (Reader.open(r.checkpoint(step)) for r in (run, other_parts))
        assert ours.frozen == theirs.frozen
        assert ours.tensors.keys() == theirs.tensors.keys()


@pytest.mark.parametrize("name", mostly_slow(["ddp@1", "ddp@2", "fsdp@2", "zero1@2", "zero2@2", "zero3@2"], []))
def test_moments_of_an_opened_part_begin_at_zero_beside_the_others(published: Path, projection: Run, name: str) -> None:
    runner, _, size = name.partition("@")
    folder = published.parent / f"beside_{name}"
    shutil.copytree(projection.folder, folder)
    given = (*UNTIL_12, QFORMER, f"run.runner={runner}")
    if runner.startswith("zero"):
        with pytest.raises(
            AssertionError, match=r"this runner keeps one value for both; use a runner such as ddp or fsdp"
        ):
            train(published, folder.name, *given, size=int(size))
        return
    run = train(published, folder.name, *given, size=int(size))
    tensors = {k: v for f in run.checkpoint(12).glob("*.safetensors") for k, v in load_file(f).items()}
    assert tensors["step/query_tokens"] == 4
    assert tensors["step/language_projection.weight"] == 12


# ---- a stage after another


def beginning(project: Path, stage: Path, *given: str) -> dict[str, torch.Tensor]:
    """The parameters of a new run that takes those of an earlier one."""
    return build(project, f"model.pretrained={stage}", *given).model.weights.parameters()


def test_a_second_stage_begins_with_the_weights_of_the_first(published: Path, projection: Run) -> None:
    first = build(published, checkpoint=projection.checkpoint(8)).model.weights.parameters()
    second = beginning(published, projection.folder, QFORMER, *LORA)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    added = second.keys() - first.keys()
    assert added
    assert all(".lora_" in name for name in added)
    initial = build(published).model.weights.parameters()["language_projection.weight"]
    assert not torch.equal(initial, first["language_projection.weight"]), "training changed something"


@pytest.mark.slow
def test_every_tensor_of_an_earlier_stage_is_accounted_for(published: Path, projection: Run, adapted: Run) -> None:
    run = train(published, "stage2", f"model.pretrained={projection.folder}", "model.projector.freeze=true", *LORA)
    said = (run.folder / "log.txt").read_text()
    assert f"2 parameters are initialized from the weights in {projection.checkpoint(8)}\n" in said
    assert re.search(
        r"parameters are initialized from the weights in \S*blip2; \d+ of its parameters are not used, "
        r"such as language_",
        said,
    )
    assert re.search(r"28 parameters are newly initialized, such as language_model\S+lora_A\.weight\n", said)
    kept = stored(run.checkpoint(8))
    assert "language_projection.weight" in kept, "what a run trained is in the checkpoints of the next"
    build(published, *LORA, "model.projector.freeze=true", checkpoint=run.checkpoint(8))
    with pytest.raises(CheckpointError, match=r"has 28 parameters that the model lacks, such as .*lora_A\.weight"):
        beginning(published, adapted.folder)
    for part, name in (("vision", r"vision_model\."), ("qformer", r"q\w+"), ("language_model.model", r"lang\w+\.")):
        with pytest.raises(
            CheckpointError, match=rf"has no parameter {name}.*, which was frozen; set its pretrained weights"
        ):
            beginning(published, projection.folder, f"model.{part}.pretrained=null", *SIZES)


def test_other_frozen_weights_than_the_earlier_stage_s_are_refused(published: Path, projection: Run) -> None:
    shutil.copytree(published.parent / "qwen", other := published.parent / "other_qwen", dirs_exist_ok=True)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"language_model\.model\.norm\.weight is frozen and differs"):
        beginning(published, projection.folder, f"model.language_model.model.pretrained={other}")
    # The projection alone may be taken to another language model.
    taken = build(
        published, f"model.language_model.model.pretrained={other}", f"model.projector.pretrained={projection.folder}"
    )
    first = build(published, checkpoint=projection.checkpoint(8)).model.projector.weight
    assert torch.equal(taken.model.projector.weight, first)


@pytest.mark.parametrize("part", mostly_slow(["projector", "vision", "qformer"], ["projector"]))
def test_a_part_is_exported_alone_and_begins_another_run(
    published: Path, projection: Run, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / part
    assert main(["export", "--checkpoint", str(projection.folder), "--part", part, "--output", str(out)]) == 0
    assert f"; model.{part}.pretrained={out} starts a run from it\n" in capsys.readouterr().out
    there = load_file(out / "model.safetensors")
    given = (f"model.{part}.pretrained={out}", "run.seed=7")
    first, again = build(published, checkpoint=projection.checkpoint(8)).model, build(published, *given).model
    begin = {"projector": "language_projection.", "vision": "vision_model.", "qformer": "q"}[part]
    assert there.keys() == (names := {name for name in first.weights.parameters() if name.startswith(begin)})
    ours, theirs = first.weights.parameters(), again.weights.parameters()
    assert all(torch.equal(ours[name], there[name]) and torch.equal(ours[name], theirs[name]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp@2", "zero3@2"])
def test_a_second_stage_begins_with_every_part_under_any_runner(published: Path, name: str) -> None:
    runner, _, size = name.partition("@")
    opened = [f"model.{part}.freeze=false" for part in FROZEN]
    one = train(published, f"all_{name}", *opened, *LORA, f"run.runner={runner}", size=int(size))
    checkpoint = one.checkpoint(8)
    assert not list(checkpoint.glob("model*.safetensors"))
    first = build(published, *LORA, checkpoint=checkpoint).model.weights.parameters()
    nothing = [f"model.{part}.pretrained=null" for part in ("vision", "qformer", "language_model.model")]
    second = beginning(published, one.folder, *LORA, *nothing, *SIZES)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    given = (f"model.pretrained={one.folder}", *LORA, f"run.runner={runner}")
    two = train(published, f"then_{name}", *given, size=int(size))
    assert two.column("loss")[-1] < one.column("loss")[0]


# ---- adapters


LORA = ("model.language_model.lora={rank: 4, alpha: 8, dropout: 0.1}",)


@pytest.fixture(scope="module")
def adapted(published: Path) -> Run:
    run = train(published, "adapted@1", *LORA)
    assert run.column("loss")[-1] < run.column("loss")[0]
    return run


def test_adapters_change_nothing_at_first_and_the_rest_is_frozen(published: Path) -> None:
    plain, with_lora = build(published), build(published, *LORA)
    batch = ConversationEncoder.collate([sample(1, 9, 0)])
    with plain.evaluating(), with_lora.evaluating():
        assert torch.equal(plain.evaluate(batch), with_lora.evaluate(batch))
    trained = {n for n, p in with_lora.model.weights.parameters().items() if p.requires_grad}
    assert all("lora_" in n or n.startswith("language_projection.") for n in trained)
    assert sum("lora_A" in n for n in trained) == 2 * 7
    assert "language_model.model.layers.0.self_attn.q_proj.lora_B.weight" in trained


@pytest.mark.parametrize("name", mostly_slow(["ddp@2", "fsdp@2", "zero2@2", "zero3@2"], []))
def test_every_runner_trains_adapters_alike(published: Path, adapted: Run, name: str) -> None:
    runner, _, size = name.partition("@")
    run = train(published, f"adapted_{name}", *LORA, f"run.runner={runner}", size=int(size))
    assert relative(run.column("loss"), adapted.column("loss")) < TOLERANCE


@pytest.mark.slow
def test_adapters_are_merged_on_export(published: Path, adapted: Run) -> None:
    out = published.parent / "exported"
    shutil.rmtree(out, ignore_errors=True)
    assert main(["export", "--checkpoint", str(adapted.folder), "--output", str(out)]) == 0
    weights = load_file(out / "model.safetensors")
    assert not any("lora_" in name for name in weights)
    ours = build(published, *LORA, checkpoint=adapted.checkpoint(8))
    merged = build(published)
    with torch.no_grad():
        for name, p in merged.model.weights.parameters().items():
            p[: weights[name].shape[0]].copy_(weights[name])
    batch = ConversationEncoder.collate([sample(1, 9, 0)])
    with ours.evaluating(), merged.evaluating():
        assert merged.evaluate(batch).item() == pytest.approx(ours.evaluate(batch).item(), rel=1e-5)
    base = load_file(published.parent / "qwen" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(weights["language_model.model.layers.0.mlp.up_proj.weight"], base)


def test_adapters_for_what_is_not_there_are_refused(published: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.language_model\.lora\.targets: .*c_attn"):
        build(published, "model.language_model.lora={targets: [c_attn]}")


ADAPTER = "model.adapter={name: lora, rank: 4, alpha: 8}"


@pytest.mark.slow
def test_an_adapter_of_the_model_is_its_language_model_s(published: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    one = train(published, "generic@1", ADAPTER)
    for name in ("fsdp@2", "zero3@2", "megatron_tp2@2"):
        runner, size = sized(name)
        run = train(published, f"generic_{name}", ADAPTER, f"run.runner={runner}", size=size)
        assert relative(run.column("loss"), one.column("loss")) < TOLERANCE
    folder = one.checkpoint(8)
    kept = load_file(folder / "adapter_model.safetensors")
    assert len(kept) == 2 * 2 * 7
    plain = AutoModelForCausalLM.from_pretrained(published.parent / "qwen")
    opened = PeftModel.from_pretrained(plain, folder).state_dict()
    for key, value in kept.items():
        assert torch.equal(opened[key.replace(".weight", ".default.weight")], value)
    again = build(published, f"model.adapter={{name: lora, pretrained: {one.folder}}}").model.weights.parameters()
    ours = build(published, ADAPTER, checkpoint=folder).model.weights.parameters()
    assert all(torch.equal(value, ours[name]) for name, value in again.items() if "lora_" in name)


@pytest.mark.slow
def test_its_language_model_is_kept_in_four_bits(published: Path) -> None:
    qlora = ADAPTER.replace("lora,", "qlora,")
    one = train(published, "four@1", qlora)
    other = train(published, "four_fsdp@2", qlora, "run.runner=fsdp", size=2)
    assert relative(other.column("loss"), one.column("loss")) < TOLERANCE
    kept = build(published, qlora).model.weights.quantized()
    assert len(kept) == 2 * 7
    assert all(module.scales.any() for module in kept.values())
    with pytest.raises(AssertionError, match="qlora quantizes weights, which deepspeed cannot train"):
        train(published, "four_zero3", qlora, "run.runner=zero3", size=2)


# ---- the recipes of the real sizes, on tiny weights in the original layouts


@pytest.mark.slow
def test_both_stages_run_end_to_end(published: Path, tmp_path: Path) -> None:
    home = published.parent
    tokenizer = home / "shapes" / "tokenizer"
    notes = [
        {
            "image": f"{i}.png",
            "conversations": [
                {"from": "human", "value": "<image>\nwhat colour is the circle"},
                {"from": "gpt", "value": "red"},
                {"from": "human", "value": "where"},
                {"from": "gpt", "value": "left"},
            ],
        }
        for i in range(6)
    ]
    captions = {"annotations": [{"image_id": str(i), "caption": "red circle top left"} for i in range(6)]}
    (tmp_path / "llava.json").write_text(json.dumps(notes))
    (tmp_path / "captions.json").write_text(json.dumps(captions))
    for i in range(6):
        picture(tmp_path / "images" / f"{i}.png", i)
        picture(tmp_path / "images" / f"{i}.jpg", i)
    tiny = {f"model.{part}.{k}": v for part in ("vision", "qformer") for k, v in MODEL[part].items()}
    tiny |= {"model.vision.pretrained": str(home / "blip2"), "model.qformer.pretrained": str(home / "blip2")}
    tiny |= {"model.language_model.model": {"name": "qwen", "pretrained": str(home / "qwen")}, "model.model_type": None}
    tiny |= {"model.vision.precision": "bf16"}  # fp16 needs a GPU
    short = {
        "run.max_iters": 3, "run.global_batch_size": 4, "run.micro_batch_size": 2, "run.warmup_steps": 1,
        "run.eval_interval": None, "run.num_workers": 0, "run.device": "cpu",
    }  # fmt: skip
    (tmp_path / "packed").mkdir()
    captioned = [{"jpg": jpeg(i), "txt": b"red circle top left"} for i in range(6)]
    write_shard(tmp_path / "packed" / "train-000000.tar", captioned)
    seen = {k: {"name": "image_eval", "image_size": 16} for k in ("train", "eval")}
    align = {
        "datasets.captions.train": f"{tmp_path}/packed/train-*.tar", "datasets.captions.val": None,
        "datasets.captions.tokenizer": str(tokenizer),
        "datasets.captions.cache": str(tmp_path / "cache"), "datasets.captions.image_tokens": 4,
        "datasets.captions.vis_processor": seen,
    }  # fmt: skip
    first = options(tiny | short | align)
    prepare_data(load_config("projects/blip2_qwen7b_align.yaml", first))
    one = train(ROOT / "projects" / "blip2_qwen7b_align.yaml", str(tmp_path / "align"), *first)
    assert {n for n in stored(one.checkpoint(3)) if "/" not in n} == {
        "language_projection.weight",
        "language_projection.bias",
    }

    common = {
        "name": "instructions", "images": str(tmp_path / "images"), "tokenizer": str(tokenizer), "image_tokens": 4,
        "vis_processor": seen, "max_skipped": 0.0,
    }  # fmt: skip
    text = {"train": {"name": "captions", "style": "chat"}, "eval": {"name": "captions", "style": "chat"}}
    parts = [
        {"ratio": 0.8, "dataset": common | {"annotations": str(tmp_path / "llava.json")}},
        {"ratio": 0.2, "dataset": common | {"annotations": str(tmp_path / "captions.json"), "text_processor": text}},
    ]
    instruct = {"datasets.mixed.parts": parts, "model.pretrained": str(one.folder), "run.max_epoch": None}
    two = train(
        ROOT / "projects" / "blip2_qwen7b_instruct.yaml",
        str(tmp_path / "instruct"),
        *options(tiny | short | instruct | {"model.qformer.freeze": False, "run.warmup_fraction": None}),
    )
    trained = {n for n in stored(two.checkpoint(3)) if "/" not in n}
    assert any("lora_A" in n for n in trained)
    assert "query_tokens" in trained
    start = load_file(next(one.checkpoint(3).glob("training*.safetensors")))["language_projection.weight"]
    end = load_file(next(two.checkpoint(3).glob("training*.safetensors")))["language_projection.weight"]
    assert 0 < (end - start).abs().max() < 1e-3, "it began where the first stage ended"
