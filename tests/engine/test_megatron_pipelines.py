"""Pipeline schedules: several stages on a rank train as one process does."""

from __future__ import annotations

import shutil
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import mostly_slow, run_ranks, train
from fixtures_training import COMMON, SETTINGS, TOLERANCE, assert_equal_training, follow, relative

SIZES = ("model.n_head=4", "model.n_layer=4", "model.dropout=0.1")
INTERLEAVED = "name: megatron, pipeline_parallel: 2, pipeline_chunks: 2"
PIPELINES = {
    "interleaved": (2, f"{{{INTERLEAVED}}}"),
    "breadth first": (2, f"{{{INTERLEAVED}, pipeline_schedule: gpipe}}"),
    "uneven": (2, f"{{{INTERLEAVED}, pipeline_layers: [1, 1, 1, 2]}}"),
    "four ranks": (4, "megatron_pp4"),
    "four ranks, three chunks": (4, "{name: megatron, pipeline_parallel: 4, pipeline_chunks: 3}"),
    "copies": (4, f"{{{INTERLEAVED}, data_parallel_style: zero1}}"),
    "with tensor parallelism": (4, f"{{{INTERLEAVED}, tensor_parallel: 2}}"),
    "with sequence parallelism": (4, f"{{{INTERLEAVED}, tensor_parallel: 2, sequence_parallel: true}}"),
}  # fmt: skip
MORE = {
    "uneven": ("model.n_layer=5",),
    "four ranks, three chunks": ("model.n_layer=12",),
} | {name: ("model.dropout=0",) for name in PIPELINES if "tensor" in name or "sequence" in name}


@pytest.fixture(scope="module", params=mostly_slow(SETTINGS, ["adamw"]))
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Any) -> Any:
    return Workspace(tmp_path_factory.mktemp(request.param), dataset), SETTINGS[request.param], {}


@pytest.mark.parametrize("name", mostly_slow(PIPELINES, []))
def test_every_schedule_trains_as_one_process_with_its_dropout(one: Any, name: str) -> None:
    workspace, settings, kept = one
    size, runner = PIPELINES[name]
    options = (*COMMON, *settings, *SIZES, *MORE.get(name, ()))
    if "model.n_layer=8" in options and settings is SETTINGS["adamw"]:
        # Eight layers amplify rounding with a rate of 1e-2: pp4 without chunks is off by 1e-3 in one step's norm, where
        # the first gradients are equal to 1e-7.
        options += ("run.init_lr=3e-3",)
    if options not in kept:
        kept[options] = follow(workspace, "ddp@1", *options, label=f"one{len(kept)}")
        losses = kept[options].column("loss")
        assert losses[-1] < 0.8 * losses[0], "nothing was learned, so nothing was compared"
    many = follow(workspace, f"megatron@{size}", *options, f"run.runner={runner}", label=name.replace(" ", "_"))
    assert_equal_training(kept[options], many, TOLERANCE)


# ---- checkpoints, evaluation

LIFE = ("run.max_iters=12", "run.lr_decay_iters=12", *COMMON[1:], *SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved"])
def test_a_checkpoint_goes_on_with_chunks_and_without(workspace: Workspace, name: str) -> None:
    size, runner = PIPELINES[name]
    one = train(workspace.project, "one", *LIFE)
    for writer, reader in ((runner, "megatron_pp2"), ("megatron_pp2", runner)):
        folder = workspace.path / "resumed"
        shutil.rmtree(folder, ignore_errors=True)
        for chosen, steps in ((writer, 6), (reader, 12)):
            train(workspace.project, "resumed", *LIFE, f"run.runner={chosen}", f"run.max_iters={steps}", size=size)
        resumed = type(one)(folder)
        assert resumed.column("step") == list(range(1, 13))
        assert resumed.column("samples") == one.column("samples")
        assert relative(resumed.column("loss"), one.column("loss")) < TOLERANCE


def _evaluate(checkpoint: str, options: tuple[str, ...]) -> tuple[float, list[int], list[int]]:
    """Loss on the validation split, and greedy continuations: with a cache that grows, and in a server's slots."""
    from crosstrain.data.splits import open_split
    from crosstrain.engine.build import build_model, make_runner
    from crosstrain.inference.decoder import Decoder
    from crosstrain.inference.open_checkpoint import saved_config
    from crosstrain.inference.perplexity import evaluate_loss

    config = saved_config(Path(checkpoint), list(options))
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, Path(checkpoint), for_training=False)
    loss = evaluate_loss(runner, open_split(config, "val"), 3, 10).loss
    grown, served = list[int](), list[int]()
    with runner.evaluating():
        cache, new = runner.model.new_cache(), torch.tensor([[1, 2, 3, 4, 5]])
        for _ in range(12):
            new = runner.evaluate({"input_ids": new, "cache": cache}).argmax(-1, keepdim=True)
            grown.append(int(new))
        decoder = Decoder(runner, 2)
        logits = decoder.start([1], {"input_ids": torch.tensor([1, 2, 3, 4, 5]).numpy()})
        for _ in range(12):
            served.append(int(logits.argmax()))
            logits = decoder.step({1: served[-1]})[1]
    runner.close()
    return loss, grown, served


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved", "four ranks, three chunks"])
def test_chunks_evaluate_and_generate_as_one_process(workspace: Workspace, name: str) -> None:
    size, runner = PIPELINES[name]
    checkpoint = train(workspace.project, "out", *LIFE, "model.n_layer=12", "run.max_iters=6").checkpoint(6)
    [one] = run_ranks(1, _evaluate, str(checkpoint), ("run.runner=ddp",))
    assert one[1] == one[2]
    for loss, grown, served in run_ranks(size, _evaluate, str(checkpoint), (f"run.runner={runner}",)):
        assert loss == pytest.approx(one[0], rel=TOLERANCE)
        assert (grown, served) == one[1:]


# ---- bubbles and refusals


def test_bubbles_and_activations_are_those_of_torchs_schedules() -> None:
    megatron = registry.get("runner", "megatron")
    from crosstrain_plugins.builtin.runners.megatron.schedules import bubble, in_flight

    def kept(name: str, ranks: int, chunks: int, count: int) -> list[float]:
        options = megatron.Options(pipeline_parallel=ranks, pipeline_chunks=chunks, pipeline_schedule=name)
        return [in_flight(options, rank, count) for rank in range(ranks)]

    for ranks in (2, 4, 8):
        for chunks in (1, 2, 3):
            for count in (ranks, 2 * ranks, 4 * ranks):
                assert bubble(ranks, chunks, count) == pytest.approx((ranks - 1) / (chunks * count + ranks - 1))
                # Narayanan et al., 2021: the first rank keeps p (1 + (p - 1) / (p v)) micro batches' activations.
                if chunks > 1 and count > 2 * ranks:
                    assert kept("1f1b", ranks, chunks, count)[0] == ranks + (ranks - 1) / chunks
                assert kept("gpipe", ranks, chunks, count) == [count] * ranks
                if chunks > 1:
                    assert kept("1f1b", ranks, chunks, count) == counted(ranks, chunks, count)
    assert kept("1f1b", 4, 1, 64) == [4, 3, 2, 1]
    assert bubble(4, 1, 9) == pytest.approx(3 / 12)
    with pytest.raises(
        ConfigError, match="1f1b on 4 ranks takes the micro batches of a step in 2 equal rounds, but there are 9"
    ):
        kept("1f1b", 4, 2, 9)


def counted(ranks: int, chunks: int, count: int) -> list[float]:
    """Return the micro batches in flight on each rank, counted in the table of torch's interleaved 1F1B."""
    many = {"group_size": ranks, "group_rank": 0, "num_stages": ranks * chunks, "submod": None}
    stages: list[Any] = [SimpleNamespace(stage_index=chunk, **many) for chunk in range(chunks)]
    table = schedules.ScheduleInterleaved1F1B(stages, count)
    found = []
    for rank in range(ranks):
        kinds = [action.computation_type.value for action in table.pipeline_order[rank] if action is not None]
        found.append(max(accumulate((kind == "F") - (kind == "B") for kind in kinds)) / chunks)
    return found


@pytest.mark.parametrize(
    ("runner", "sentence"),
    [
        ("pipeline_chunks: 2", "needs pipeline_parallel above 1"),
        ("pipeline_parallel: 2, pipeline_schedule: zbv", "expected one of 1f1b, gpipe, got the text 'zbv'"),
        ("pipeline_parallel: 2, pipeline_chunks: 2, data_parallel_style: fsdp", "only one stage per rank"),
        ("pipeline_parallel: 2, pipeline_chunks: 2, offload: cpu", "only one stage per rank"),
        ("pipeline_parallel: 2, pipeline_chunks: 2, pipeline_layers: [1, 1]", "each of the 4 stages"),
    ],
)
def test_what_cannot_be_is_one_sentence(workspace: Workspace, runner: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(workspace.project, (f"run.runner={{name: megatron, {runner}}}",))
