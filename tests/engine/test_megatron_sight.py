"""The vision-language model under the megatron runner: its language model is cut, and what sees is on every rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Run
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.data.shuffle import sample_index
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.engine.build import build_model, make_model, make_runner
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import mostly_slow, run_ranks, train
from fixtures_training import TOLERANCE, relative, sized
from fixtures_vision import LANGUAGE, OPEN, mixed_project, options, shapes, write_project

LORA = {"model.language_model.lora": {"rank": 4, "dropout": 0.0}}
ADAPTED = {"model.qformer.freeze": False} | LORA
GPT2 = {"name": "gpt2", "vocab_size": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 256, "dropout": 0.0}
MAPS = ["c_attn", "c_proj", "c_fc"]
UNTIED = LANGUAGE | {"tie_word_embeddings": False, "family": "qwen3"}
CASES: dict[str, dict[str, Any]] = {
    "projection": {},
    "everything": OPEN | {"model.language_model.lr_scale": 0.5},
    "adapters": ADAPTED,
    "adapters and all": OPEN | LORA,
    "untied": OPEN | {"model.language_model.model": UNTIED},
    "gpt2": OPEN | {"model.language_model.model": GPT2},
    "gpt2's adapters": {"model.language_model.model": GPT2} | LORA | {"model.language_model.lora.targets": MAPS},
}
LAYOUTS = ["megatron_tp2@2", "megatron_tp2@4", "megatron_tp2_zero1@4", "megatron_tp2_fsdp@4", "megatron_tp2_offload@2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project on a few rendered images, with several conversations packed into a sequence."""
    folder = tmp_path_factory.mktemp("sight")
    path = write_project(folder / "project.yaml", shapes(folder), max_iters=6)
    prepare_data(load_config(path))
    dataset = open_split(load_config(path), "train")
    assert any("segments" in dataset.get(i, np.random.default_rng(i)) for i in range(8))
    return path


def under(project: Path, name: str, label: str, *given: str) -> Run:
    """Train under the runner and world size that `name` says, once for each label."""
    folder = project.parent / f"{label}_{name}"
    if (folder / "checkpoints" / "latest").exists():
        return Run(folder)
    runner, size = sized(name)
    return train(project, folder.name, *given, f"run.runner={runner}", size=size)


def assert_alike(many: Run, one: Run) -> None:
    assert many.column("samples") == one.column("samples")
    assert relative(many.column("loss"), one.column("loss")) < TOLERANCE
    assert relative(many.column("grad_norm"), one.column("grad_norm")) < TOLERANCE


@pytest.mark.parametrize("case", mostly_slow(CASES, []))
def test_two_ranks_train_every_part_alike(project: Path, case: str) -> None:
    given = options(CASES[case])
    one = under(project, "ddp@1", case, *given)
    assert one.column("loss")[-1] < one.column("loss")[0]
    assert_alike(under(project, "megatron_tp2@2", case, *given), one)


RECOMPUTED = [("megatron_tp2@2", mode) for mode in ("full", "selective", "offload")] + [("megatron_tp2_fsdp@4", "full")]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mode"), [*((layout, "none") for layout in LAYOUTS[1:]), *RECOMPUTED])
def test_copies_and_recomputation_change_nothing(project: Path, layout: str, mode: str) -> None:
    given = options(CASES["adapters and all"])
    one = under(project, "ddp@1", "adapters and all", *given)
    assert_alike(under(project, layout, f"{mode} kept", *given, f"run.gradient_checkpointing={mode}"), one)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_whose_batch_is_text_alone_takes_part(tmp_path: Path, project: Path, layout: str) -> None:
    mixed = mixed_project(tmp_path, project.parent / "shapes" / "tokenizer", max_iters=6)
    config = load_config(mixed)
    length = len(open_split(config, "train"))
    first = [sample_index(config.run.seed, n, length) % 3 for n in range(2 * 6)]
    assert any((a == 0) != (b == 0) for a, b in zip(first[::2], first[1::2], strict=True)), "no copy was ever blind"
    given = options(CASES["everything"])
    assert_alike(under(mixed, layout, "mixed", *given), under(mixed, "ddp@1", "mixed", *given))


# ---- going on elsewhere, with other parts frozen

STAGES = [
    {},  # the projection alone
    {"model.qformer.freeze": False, "run.resume_optimizer": False},
    {"model.qformer.freeze": False, "model.projector.freeze": True},
    OPEN | {"run.resume_optimizer": False},
]
ROADS = [
    ("ddp@1", "megatron_tp2@2", "fsdp@2", "megatron_tp2@2"),
    ("megatron_tp2@2", "fsdp@2", "megatron_tp2@2", "ddp@1"),
    ("fsdp@2", "ddp@1", "megatron_tp2@4", "zero2@2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_any_runner_goes_on_when_parts_are_frozen_and_opened(project: Path, road: tuple[str, ...]) -> None:
    losses = []
    for runners in (("ddp@1",) * len(STAGES), road):
        folder = "_".join(runners)
        shutil.rmtree(project.parent / folder, ignore_errors=True)
        for number, (stage, name) in enumerate(zip(STAGES, runners, strict=True), 1):
            runner, size = sized(name)
            given = [*options(stage), f"run.max_iters={3 * number}", "run.lr_decay_iters=12", f"run.runner={runner}"]
            run = train(project, folder, *given, size=size)
        losses.append(run.column("loss"))
    assert len(losses[0]) == 3 * len(STAGES)
    assert relative(losses[1], losses[0]) < TOLERANCE


# ---- evaluation


def _asked(checkpoint: str, options: tuple[str, ...]) -> tuple[float, list[list[str]]]:
    """Loss on the validation split, and what is answered there."""
    from crosstrain_plugins.builtin.evaluations.answers.vqa import answer_questions
    from transformers import AutoTokenizer

    from crosstrain.inference.chat_form import ChatForm
    from crosstrain.inference.open_checkpoint import saved_config
    from crosstrain.inference.perplexity import evaluate_loss

    config = saved_config(Path(checkpoint), list(options))
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, Path(checkpoint), for_training=False)
    dataset = open_split(config, "val")
    loss = evaluate_loss(runner, dataset, 2, 6).loss
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    end = ChatForm.of_training(config, Path(checkpoint)).builder.end_id  # type: ignore[union-attr]
    answers, _ = answer_questions(runner, tokenizer, end, dataset, 4, 6, 8)
    runner.close()
    return loss, [list(map(str, answer.document().values())) for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_spread_answers_as_one_process_does(project: Path, layout: str) -> None:
    checkpoint = str(under(project, "ddp@1", "everything", *options(CASES["everything"])).checkpoint(6))
    [(loss, said)] = run_ranks(1, _asked, checkpoint, ("run.runner=ddp",))
    runner, size = sized(layout)
    for there in run_ranks(size, _asked, checkpoint, (f"run.runner={runner}",)):
        assert there[0] == pytest.approx(loss, rel=TOLERANCE)
        assert there[1] == said
    assert said


# ---- what is cut


def test_the_plan_of_a_model_within_a_model_names_its_parameters_and_its_adapters(project: Path) -> None:
    with parameters_on_meta():
        config = load_config(project, options(LORA | {"model.language_model.lora.targets": ["q_proj"]}))
        model = make_model(config)
    plan = model.structure.tensor_parallel_plan()
    assert plan["language_model.model.embed_tokens"] == "vocabulary"
    assert plan["language_model.model.layers.*.self_attn.q_proj.lora_B"] == "column"
    assert [key for key in plan if "lora" in key] == ["language_model.model.layers.*.self_attn.q_proj.lora_B"]
    runner = registry.get("runner", "megatron")
    runner.check_model(runner.Options(tensor_parallel=2), config.run, model)
    with pytest.raises(ConfigError, match=r"k_proj.weight of shape \[16, 32\] cannot be cut .*; the model allows 1, 2"):
        runner.check_model(runner.Options(tensor_parallel=4), config.run, model)


# ---- pipelines and split sequences

SPLITS = {
    "pp2": "{name: megatron, pipeline_parallel: 2}",
    "tp2_sp": "{name: megatron, tensor_parallel: 2, sequence_parallel: true}",
    "cp2": "{name: megatron, context_parallel: 2}",
}


@pytest.mark.parametrize("case", mostly_slow(["everything", "adapters and all", "gpt2"], []))
@pytest.mark.parametrize("split", mostly_slow(SPLITS, []))
def test_stages_and_parts_of_sequences_train_alike(project: Path, case: str, split: str) -> None:
    """Images and queries are computed in the first stage, and before sequences are split.

    Ranks that share a sequence draw different dropout masks, so there is no dropout.
    """
    given = options(CASES[case] | {"model.qformer.dropout": 0.0})
    one = under(project, "ddp@1", f"{case} without dropout", *given)
    assert_alike(train(project, f"{case} {split}", *given, f"run.runner={SPLITS[split]}", size=2), one)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_text_only_batches_are_split_too(tmp_path: Path, project: Path, split: str) -> None:
    mixed = mixed_project(tmp_path, project.parent / "shapes" / "tokenizer", max_iters=6)
    given = options(CASES["everything"] | {"model.qformer.dropout": 0.0})
    many = train(mixed, split, *given, f"run.runner={SPLITS[split]}", size=2)
    assert_alike(many, under(mixed, "ddp@1", "mixed without dropout", *given))
