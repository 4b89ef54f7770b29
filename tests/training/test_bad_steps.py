"""A planted NaN sample, and a planted spike, under each policy and every runner."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from conftest import Run, Workspace
from crosstrain.config.load import load_config
from crosstrain.data.loader import one_sample
from crosstrain.data.shuffle import sample_index
from crosstrain.data.skip_ranges import leave_out, numbers, show
from crosstrain.data.splits import open_split
from crosstrain.engine.build import build_model
from crosstrain.engine.runner import Runner
from crosstrain.utils.errors import ConfigError
from fixtures_qwen import use
from fixtures_ranks import mostly_slow, train
from fixtures_training import TOLERANCE, relative, sized

# NaN is not in the code but in a weight, so that every runner cuts, gathers and computes it as it does any other.
PLANTS = '''
from dataclasses import dataclass, field
from crosstrain import TransformersWeights
from crosstrain.config.registry import registry
Text, Qwen = registry.get("dataset", "text"), registry.get("model", "qwen")

class PoisonedWeights(TransformersWeights):
    """Token 329 of a vocabulary of 330 has an embedding of NaN."""
    def initialize(self, name, value, rng):
        super().initialize(name, value, rng)
        if name == "model.embed_tokens.weight":
            value[329] = float("nan")

@registry.register_model("poisoned")
class Poisoned(Qwen):
    def __init__(self, options):
        super().__init__(options)
        self.weights = PoisonedWeights(self)

@registry.register_dataset("planted")
class Planted(Text):
    """Some samples hold that token; the targets of others are one that occurs nowhere else."""
    @dataclass
    class Options(Text.Options):
        poison: list[int] = field(default_factory=list)
        odd: list[int] = field(default_factory=list)

    def get(self, index, rng):
        sample = {key: tokens.copy() for key, tokens in super().get(index, rng).items()}
        if index in self.options.poison:
            sample["input_ids"][3] = 329
        if index in self.options.odd:
            sample["labels"][:] = 325
        return sample
'''
SEED, BATCH, STEPS, POISONED = 1234, 8, 10, (37, 61)  # numbers of samples: in steps 5 and 8
OPTIONS = (
    f"run.max_iters={STEPS}", "run.save_interval=4", "run.micro_batch_size=4", "run.lr_sched=constant",
    "run.weight_decay=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("planted"), dataset)
    (workspace.path / "plugins").mkdir()
    (workspace.path / "plugins" / "planted.py").write_text(PLANTS)
    workspace.config["run"]["plugins"] = [str(workspace.path / "plugins")]
    workspace.config["datasets"]["tiny"]["name"] = "planted"
    use(
        workspace,
        arch="poisoned",
        vocab_size=330,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return workspace


def index_of(workspace: Workspace, number: int) -> int:
    length = len(open_split(load_config(workspace.project, []), "train"))
    assert length > STEPS * BATCH + 2 * BATCH, "a planted sample would come twice"
    return sample_index(SEED, number, length)


def plant(workspace: Workspace, *poisoned: int, odd: tuple[int, ...] = ()) -> tuple[str, ...]:
    """Options that put the plants at these sample numbers."""
    return (
        f"datasets.tiny.poison={[index_of(workspace, n) for n in poisoned]}",
        f"datasets.tiny.odd={[index_of(workspace, n) for n in odd]}",
    )


def expected(workspace: Workspace, steps: list[list[int] | None]) -> list[float | None]:
    """Losses of a plain loop in torch over steps of these sample numbers; a step that is None is left out."""
    config = load_config(workspace.project, [*OPTIONS])
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, None, for_training=False)
    model, data = runner.model.lm.train(), open_split(config, "train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.run.init_lr, betas=(0.9, 0.999), weight_decay=0)
    losses: list[float | None] = []
    for step in steps:
        if step is None:
            losses.append(None)
            continue
        samples = [one_sample(data, SEED, number) for number in step]
        batch = {key: torch.cat([sample[key] for sample in samples]) for key in samples[0]}
        logits = model(batch["input_ids"]).logits[..., :330]
        loss = cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def skipping(planted: Workspace) -> list[float | None]:
    steps = [list(range(first, first + BATCH)) for first in range(0, STEPS * BATCH, BATCH)]
    return expected(planted, [None if set(step) & set(POISONED) else step for step in steps])


@pytest.fixture(scope="module")
def leaving_out(planted: Workspace) -> list[float | None]:
    bad = {*range(32, 40), *range(56, 64)}
    kept = [n for n in range(STEPS * BATCH + len(bad)) if n not in bad]
    return expected(planted, [kept[i : i + BATCH] for i in range(0, STEPS * BATCH, BATCH)])


def assert_losses(run: Run, losses: list[float | None], tolerance: float = 2e-5) -> None:
    """The default tolerance: of transformers' own loss and torch's own norm, whose rounding AdamW amplifies."""
    assert run.column("step") == list(range(1, len(losses) + 1))
    found = run.column("loss")
    assert [loss is None for loss in found] == [loss is None for loss in losses]
    pairs = [(a, b) for a, b in zip(found, losses, strict=True) if b is not None]
    assert relative(*map(list, zip(*pairs, strict=True))) < tolerance


def state_of(run: Run, step: int) -> dict[str, Any]:
    return json.loads((run.checkpoint(step) / "state.json").read_text())


def bad_steps(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "bad_steps.jsonl").read_text().splitlines()]


RUNNERS = [
    "ddp@1", "ddp@2", "fsdp@2", "zero0@2", "zero1@2", "zero2@2", "zero3@2", "zero2_offload@2", "megatron_tp2@2",
    "megatron_pp2@2", "megatron_tp2_pp2@4", "megatron_tp2_zero1@4", "megatron_tp2_fsdp@4",
]  # fmt: skip


def under(workspace: Workspace, name: str, label: str, *options: str) -> Run:
    runner, size = sized(name)
    return train(workspace.project, f"{label}_{name}", *OPTIONS, *options, f"run.runner={runner}", size=size)


@pytest.fixture(scope="module")
def references(planted: Workspace) -> dict[str, Run]:
    return {
        policy: under(planted, "ddp@1", policy, *plant(planted, *POISONED), f"run.on_bad_step={policy}")
        for policy in ("skip", "roll_back")
    }


def assert_named(planted: Workspace, run: Run, policy: str) -> None:
    rows = bad_steps(run)
    for row, number in zip(rows, POISONED, strict=True):
        [suspect] = row["suspects"]
        assert (suspect["samples"], suspect["indices"]) == ([number], [index_of(planted, number)])
        assert suspect["loss"] is None
        assert re.fullmatch(r"document(s \d+ to)? \d+ of .*/tiny", suspect["whereabouts"][0])
    assert [row["step"] for row in rows] == [5, 8 if policy == "skip" else 7]
    assert [row["samples"] for row in rows] == [[[32, 39]], [[56, 63]]]
    log = (run.folder / "log.txt").read_text()
    assert f"(samples 32 to 39): the loss is not finite, because of sample 37 (index {index_of(planted, 37)}" in log


@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_the_policy_is_what_a_plain_loop_does(
    planted: Workspace, references: dict[str, Run], skipping: list, leaving_out: list, policy: str
) -> None:
    run = references[policy]
    assert_losses(run, skipping if policy == "skip" else leaving_out)
    assert_named(planted, run, policy)
    state = state_of(run, 10)
    if policy == "skip":
        assert (state["skipped"], state["left_out"]) == ([[5, 32, 39], [8, 56, 63]], [])
        assert (state["step"], state["applied_steps"], state["samples"]) == (10, 8, 80)
    else:
        assert (state["skipped"], state["left_out"]) == ([], [[32, 39], [56, 63]])
        assert (state["step"], state["applied_steps"], state["samples"]) == (10, 10, 96)


@pytest.mark.parametrize("name", mostly_slow(RUNNERS[1:], []))
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_every_runner_does_the_same(planted: Workspace, references: dict[str, Run], policy: str, name: str) -> None:
    run = under(planted, name, policy, *plant(planted, *POISONED), f"run.on_bad_step={policy}")
    assert_losses(run, references[policy].column("loss"), TOLERANCE)
    assert run.column("samples") == references[policy].column("samples")
    assert_named(planted, run, policy)
    kept = ("step", "applied_steps", "samples", "left_out", "skipped")
    ours, theirs = state_of(run, 10), state_of(references[policy], 10)
    assert [ours[key] for key in kept] == [theirs[key] for key in kept]


@pytest.mark.parametrize("name", mostly_slow(RUNNERS, []))
def test_stop_ends_with_the_sample_and_the_last_checkpoint(planted: Workspace, name: str) -> None:
    words = (
        rf"step 5 \(samples 32 to 39\): the loss is not finite, because of sample 37 \(index {index_of(planted, 37)} "
    )
    with pytest.raises(AssertionError, match="TrainingError: " + words):
        under(planted, name, "stop", *plant(planted, *POISONED))
    run = Run(planted.path / f"stop_{name}")
    assert run.column("step") == [1, 2, 3, 4]
    assert (run.folder / "checkpoints" / "latest").read_text() == "step_000004\n"
    assert not run.checkpoint(5).exists()
    mended = under(planted, name, "stop")  # the same command on mended data
    assert mended.column("step") == list(range(1, 11))
    assert None not in mended.column("loss")


@pytest.mark.slow
def test_the_command_ends_with_one_sentence(planted: Workspace) -> None:
    run = planted.train("stopped", *OPTIONS, *plant(planted, 1), "run.micro_batch_size=8", fails=True)
    assert run.code == 1
    assert "Traceback" not in run.out + run.err
    assert "error: step 1 (samples 0 to 7): the loss is not finite, because of sample 1 (index" in run.err


CHANGES = [("zero2@2", "ddp@1"), ("ddp@1", "megatron_tp2@2"), ("megatron_pp2@2", "fsdp@2"), ("ddp@1", "ddp@2")]


@pytest.mark.parametrize("change", mostly_slow(CHANGES, []))
def test_a_resume_under_another_runner_leaves_out_the_same(
    planted: Workspace, references: dict[str, Run], change: tuple[str, str]
) -> None:
    label, options = f"changed_{change[0]}", (*plant(planted, *POISONED), "run.on_bad_step=roll_back")
    first = under(planted, change[0], label, *options, "run.max_iters=6")
    assert state_of(first, 6)["left_out"] == [[32, 39]]
    runner, size = sized(change[1])
    run = train(planted.project, first.folder.name, *OPTIONS, *options, f"run.runner={runner}", size=size)
    assert_losses(run, references["roll_back"].column("loss"), TOLERANCE)
    assert state_of(run, 10)["left_out"] == [[32, 39], [56, 63]]


@pytest.mark.slow
def test_before_the_first_checkpoint_there_is_one_to_go_back_to(planted: Workspace) -> None:
    options = (*plant(planted, 3), "run.on_bad_step=roll_back", "run.max_iters=3", "run.keep_last=null")
    run = under(planted, "ddp@1", "beginning", *options)
    assert state_of(run, 0)["left_out"] == []
    assert_losses(run, expected(planted, [list(range(first, first + 8)) for first in (8, 16, 24)]))
    assert state_of(run, 3)["left_out"] == [[0, 7]]


@pytest.mark.parametrize(
    ("policy", "words"), [("skip", "3 bad steps in a row were skipped"), ("roll_back", "3 bad steps came after")]
)
def test_patience_ends(planted: Workspace, policy: str, words: str) -> None:
    options = (*plant(planted, 8, 16, 24, 32, 40), f"run.on_bad_step={{policy: {policy}, max_in_a_row: 3}}")
    with pytest.raises(AssertionError, match=words):
        under(planted, "ddp@1", f"patience_{policy}", *options)


# ---- spikes


SPIKE = "run.on_bad_step={policy: roll_back, spike: 1.1, spike_window: 5}"  # it is 1.145 times the median


@pytest.mark.parametrize("name", mostly_slow(["ddp@1", "zero3@2", "megatron_tp2_pp2@4"], []))
def test_a_spike_is_left_out_and_its_micro_batch_named(planted: Workspace, name: str) -> None:
    odd = plant(planted, odd=tuple(range(60, 64)))
    run = under(planted, name, "spike", *odd, SPIKE)
    [row] = bad_steps(run)
    assert (row["step"], row["samples"]) == (8, [[56, 63]])
    assert row["suspects"][0]["samples"] == [60, 61, 62, 63]
    kept = [n for n in range(88) if not 56 <= n < 64]
    assert_losses(run, expected(planted, [kept[i : i + 8] for i in range(0, 80, 8)]))
    assert "the highest losses are those of samples 60 to 63 (indices" in (run.folder / "log.txt").read_text()


@pytest.mark.slow
def test_a_resumed_run_finds_the_same_spike(planted: Workspace) -> None:
    options = (*plant(planted, odd=tuple(range(60, 64))), SPIKE.replace("roll_back", "skip"))
    under(planted, "ddp@1", "resumed_spike", *options, "run.max_iters=7")
    resumed = under(planted, "ddp@1", "resumed_spike", *options)
    assert state_of(resumed, 10)["skipped"] == [[8, 56, 63]]
    assert len(state_of(resumed, 10)["recent_losses"]) == 5


# ---- loss scales


def test_overflows_of_fp16_are_no_bad_steps_and_a_nan_loss_is(planted: Workspace) -> None:
    fp16 = "run.amp={dtype: fp16, initial_scale: 67108864, window: 3, hysteresis: 1}"
    run = under(planted, "ddp@1", "fp16", *plant(planted, 61), fp16, "run.on_bad_step=skip")
    state = state_of(run, 10)
    assert state["skipped"] == [[8, 56, 63]]
    assert state["step"] - state["applied_steps"] > 1, "no overflow, so nothing was tested"
    scales = run.column("loss_scale")
    assert scales[8] == scales[7], "a refused step moved the scale"


# ---- numbers, and what is refused


def test_numbers_that_are_left_out() -> None:
    left_out = leave_out(leave_out([], range(32, 40)), range(8, 16))
    assert left_out == [[8, 15], [32, 39]]
    assert leave_out(left_out, range(16, 18)) == [[8, 17], [32, 39]]
    assert leave_out(left_out, [3, 4, 33, 50]) == [[3, 4], [8, 15], [32, 39], [50, 50]]
    bad = {*range(8, 16), *range(32, 40)}
    for start in (0, 5, 8, 12, 16, 31, 35, 40):
        assert list(islice(numbers(start, left_out), 30)) == [n for n in range(start, 200) if n not in bad][:30]
    assert next(numbers(7, [])) == 7
    assert (show([4]), show([4, 5]), show([4, 5, 9])) == ("sample 4", "samples 4 to 5", "samples 4 to 5 and 9")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["run.on_bad_step=rollback"], "expected one of stop, skip, roll_back, got the text 'rollback'; did you mean"),
        (["run.on_bad_step=roll_back"], "roll_back needs checkpoints: set save_interval, or use skip"),
        (["run.on_bad_step.spike=0.5"], "run.on_bad_step.spike: expected a number above 1, got 0.5"),
        (["run.on_bad_step=roll_back", "run.save_interval=2", "run.resume_optimizer=false"], "run.resume_optimizer"),
    ],
)
def test_what_makes_no_sense_is_refused(workspace: Workspace, options: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(workspace.project, options)
    assert words in str(raised.value)


def test_short_and_long_forms_mix(workspace: Workspace) -> None:
    workspace.config["run"]["on_bad_step"] = {"policy": "skip", "spike": 2.5}
    workspace.project.write_text(json.dumps(workspace.config))
    chosen = load_config(workspace.project, ["run.on_bad_step=stop"]).run.on_bad_step
    assert (chosen.policy, chosen.spike) == ("stop", 2.5)
