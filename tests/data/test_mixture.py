"""Shares of a mixture at every prefix, and sequence lengths by step: functions of a number, whoever asks and when."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from hypothesis import given, settings
from hypothesis import strategies as st

import crosstrain
from conftest import Workspace, json_lines, write_text
from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.config.run_options import CurriculumOptions
from crosstrain.config.schema import Checker, OptionError
from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import training_steps
from crosstrain.data.splits import named_splits, open_split
from crosstrain.utils.errors import ConfigError, DataError
from fixtures_ranks import run_ranks, train
from fixtures_shards import module_of
from fixtures_training import evaluate

mixing = module_of("mixture", "mixture_order")

WEIGHTS = st.lists(st.sampled_from([1, 2, 3, 5, 7, 11, 0.1, 0.25, 100]), min_size=1, max_size=7)


@settings(deadline=None, max_examples=60)
@given(WEIGHTS)
def test_every_prefix_is_less_than_one_sample_off(weights: list[float]) -> None:
    counts = mixing.quantise(weights)
    order, period = mixing.StagedOrder({0: weights}), sum(counts)
    length = min(2 * period + 3, 3000)
    turns = [order.place(n) for n in range(length)]
    shares = np.array(counts) / period
    had = np.cumsum(np.eye(len(counts))[[k for k, _ in turns]], axis=0)
    assert np.abs(had - np.arange(1, length + 1)[:, None] * shares).max() < 1
    for k in range(len(counts)):
        assert [n for j, n in turns if j == k] == list(range(int(had[-1, k])))


def test_weights_are_exact_where_a_short_period_allows_it() -> None:
    assert mixing.quantise([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert mixing.quantise([3, 1]) == [3, 1]
    assert mixing.quantise([1]) == [1]
    rough = mixing.quantise([1 / 3 + 1e-9, 1e-9, 2 / 3])
    assert sum(rough) == 1 << 16
    assert rough[1] == 1
    assert rough[0] == round((1 << 16) / 3)


def test_the_place_of_a_sample_far_away_is_looked_up() -> None:
    order, counts = mixing.StagedOrder({0: [7, 2, 1]}), [7, 2, 1]
    k, before = order.place(10**15 + 3)
    assert (k, before) == (order.place(3)[0], order.place(3)[1] + 10**14 * counts[k])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 40), st.tuples(*[st.sampled_from([0, 1, 2, 5])] * 3)), max_size=3))
def test_shares_change_at_their_samples_and_every_source_goes_on(later: list[tuple[int, tuple[int, ...]]]) -> None:
    stages, start = {0: (3, 0, 1)}, 0
    for length, weights in later:
        start += length
        stages[start] = weights if any(weights) else (1, 1, 1)
    order, end = mixing.StagedOrder(stages), start + 50
    turns = [order.place(n) for n in range(end)]
    for k in range(3):
        mine = [n for j, n in turns if j == k]
        assert mine == list(range(len(mine)))
    for begin, stop in zip(sorted(stages), [*sorted(stages)[1:], end], strict=True):
        shares = np.array(stages[begin]) / sum(stages[begin])
        had = np.cumsum(np.eye(3)[[k for k, _ in turns[begin:stop]]], axis=0)
        assert np.abs(had - np.arange(1, stop - begin + 1)[:, None] * shares).max() < 1


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> list[str]:
    """The prepared dataset of the tests, and a smaller one with the same tokenizer."""
    folder = tmp_path_factory.mktemp("parts")
    source = json_lines(folder / "t.jsonl", [" ".join(f"ban{i}" for i in range(k, k + 40)) for k in range(12)])
    prepare(PrepareOptions(input=str(source), tokenizer=str(dataset / "tokenizer")), folder / "small", False)
    return [str(dataset), str(folder / "small")]


def tree(parts: list[str], *ratios: float | None) -> dict[str, Any]:
    text = {"name": "text", "seq_length": 32, "split": [8, 1, 1]}
    return {"parts": [{"dataset": text | {"path": p}, "ratio": r} for p, r in zip(parts, ratios, strict=True)]}


def mixture(parts: list[str], *ratios: float | None, split: str = "train", **more: Any) -> Any:
    cls = registry.get("dataset", "mixture")
    options = Checker(lambda key: ".".join(key)).dataclass(cls.Options, tree(parts, *ratios) | more, ())
    return cls(options, split)


def origins(dataset: Any, numbers: range, seed: int = 5) -> list[tuple[int, int]]:
    """(part, index in it) of samples of a run."""
    found = []
    for n in numbers:
        index = dataset.training_index(seed, n)
        k = int(np.searchsorted(dataset.starts, index, "right")) - 1
        found.append((k, (index - dataset.starts[k]) % len(dataset.parts[k])))
    return found


def test_a_part_goes_round_at_its_own_pace_each_time_in_another_order(parts: list[str]) -> None:
    mixed = mixture(parts, 0.75, 0.25)
    size = len(mixed.parts[1])
    drawn = [index for k, index in origins(mixed, range(4 * 4 * size)) if k == 1]
    rounds = [drawn[k * size : (k + 1) * size] for k in range(4)]
    assert all(sorted(one) == list(range(size)) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 4


def test_a_part_of_a_later_stage_begins_with_its_first_samples(parts: list[str]) -> None:
    plain, staged = mixture(parts, 1.0, 1.0), mixture(parts, 1.0, 0.0, stages=[{"after": 7, "ratios": [1, 3]}])
    seen = origins(staged, range(15))
    assert [k for k, _ in seen[:7]] == [0] * 7
    assert sorted(k for k, _ in seen[7:]) == [0, 0, 1, 1, 1, 1, 1, 1]
    for part in (0, 1):
        mine = [index for k, index in seen if k == part]
        assert mine == [index for k, index in origins(plain, range(30)) if k == part][: len(mine)]
    every = mixture(parts, 1.0, 0.0, split="val", stages=[{"after": 7, "ratios": [1, 3]}])
    places = [every.evaluation_index(n) for n in range(len(every))]
    assert sorted(places) == list(range(len(every)))


@pytest.mark.parametrize(
    ("ratios", "stages", "words"),
    [
        ((1.0, 1.0), [{"after": 9, "ratios": [1, 2]}, {"after": 5, "ratios": [1, 2]}], r"\[9, 5\] samples"),
        ((1.0, 1.0), [{"after": 9, "ratios": [1]}], "one ratio for each part"),
        ((1.0, 1.0), [{"after": 9, "ratios": [0, 0]}], "one that is not 0"),
        ((1.0, 0.0), [], "no stage uses part 1"),
    ],
)
def test_stages_that_say_nothing_are_refused(
    parts: list[str], ratios: tuple[float, ...], stages: list[Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        mixture(parts, *ratios, stages=stages)


def test_samples_are_what_their_number_says_and_evaluation_is_mixed_too(parts: list[str]) -> None:
    mixed: Dataset = mixture(parts, 2.0, 1.0)
    plan = BatchPlan(6, 2, 3, 1)
    steps = training_steps(mixed, plan, seed=5, start=0, dp_rank=0)
    later = training_steps(mixed, plan, seed=5, start=24, dp_rank=0)
    for whole, resumed in zip(islice(steps, 4, 6), later, strict=False):
        for a, b in zip(whole, resumed, strict=True):
            assert a.first_sample == b.first_sample
            assert bool((a.data["input_ids"] == b.data["input_ids"]).all())
    kinds = [int(mixed.evaluation_index(n) >= mixed.starts[1]) for n in range(9)]  # type: ignore[attr-defined]
    assert sum(kinds) == 3


def test_parts_without_ratios_have_the_shares_of_their_sizes(parts: list[str]) -> None:
    mixed = mixture(parts, None, None)
    sizes = [len(part) for part in mixed.parts]
    assert len(mixed) == sum(sizes)
    assert sorted(origins(mixed, range(sum(sizes)))) == [(k, i) for k in range(2) for i in range(sizes[k])]


# ---- curriculum


def test_lengths_grow_by_step_as_deepspeed_has_it() -> None:
    linear = CurriculumOptions(start=8, steps=10, multiple_of=8)
    assert [linear.length(step, 64) for step in (1, 5, 9, 10, 99)] == [8, 32, 56, 64, 64]
    root = CurriculumOptions(start=8, steps=100, multiple_of=8, degree=2.0)
    assert [root.length(step, 64) for step in (1, 25, 49, 100)] == [8, 32, 40, 64]
    assert CurriculumOptions(start=8, steps=2).length(1, 30) == 16  # the last length need not be a multiple
    assert CurriculumOptions(start=8, steps=2).length(2, 30) == 30


def test_impossible_curricula_are_refused() -> None:
    with pytest.raises(OptionError, match="start: 10 is not a multiple of 8"):
        CurriculumOptions(start=10, steps=5)
    with pytest.raises(ConfigError, match="steps: expected a whole number of at least 1, got 0"):
        Checker(".".join).dataclass(CurriculumOptions, {"start": 8, "steps": 0}, ())
    with pytest.raises(ConfigError, match="start: 40 is more than the dataset's seq_length, 32"):
        CurriculumOptions(start=40, steps=5).check(32)
    with pytest.raises(ConfigError, match="no fixed length"):
        CurriculumOptions(start=8, steps=5).check(None)


@pytest.mark.slow
def test_a_curriculum_and_a_mixture_train_alike_under_every_runner(workspace: Workspace, parts: list[str]) -> None:
    import yaml

    workspace.config["datasets"] = {"mixed": {"name": "mixture", **tree(parts, 0.7, 0.3)}}
    workspace.config["run"] |= {"curriculum": {"start": 8, "steps": 8}, "max_iters": 10, "micro_batch_size": 2}
    workspace.config["model"]["dropout"] = 0.0
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    one = train(workspace.project, "one")
    assert one.column("sequence_length") == [8, 8, 16, 16, 16, 24, 24, 32, 32, 32]
    for name, runner in {"two": "ddp", "zero": "zero1", "shards": "zero2", "tensor": "megatron_tp2"}.items():
        other = train(workspace.project, name, f"run.runner={runner}", size=2)
        assert other.column("sequence_length") == one.column("sequence_length")
        # fp32 sums in another order; the losses are near 6.
        np.testing.assert_allclose(other.column("loss"), one.column("loss"), rtol=2e-5)
    train(workspace.project, "resumed", "run.max_iters=5", "run.lr_decay_iters=10")
    whole = train(workspace.project, "whole", "run.lr_decay_iters=10")
    resumed = train(workspace.project, "resumed", "run.lr_decay_iters=10")
    assert resumed.column("loss") == whole.column("loss")


def test_parts_are_known_by_their_labels_and_one_may_have_all_of_val(workspace: Workspace, dataset: Path) -> None:
    part = {"name": "text", "path": str(dataset), "seq_length": 32}
    workspace.config["datasets"] = {"books": part | {"split": [1]}, "web": part | {"split": [3, 1]}}
    config = crosstrain.load_config(workspace.config)
    train, val = open_split(config, "train"), open_split(config, "val")
    assert {train.location(i).partition(",")[0] for i in range(len(train))} == {"books", "web"}
    assert {val.location(i).partition(",")[0] for i in range(len(val))} == {"web"}
    with pytest.raises(DataError, match="the test split"):
        open_split(config, "test")
    shared = {
        label: one | {"split": [3, 1], "sample_ratio": r}
        for (label, one), r in zip(workspace.config["datasets"].items(), (3, 1), strict=True)
    }
    both = open_split(crosstrain.load_config(workspace.config | {"datasets": shared}), "val")
    asked = [both.evaluation_index(n) for n in range(len(both))]
    assert sorted(asked) == list(range(len(both))), "each once"
    assert [both.location(i).partition(",")[0] for i in asked[:8]].count("books") == 6
    workspace.config["datasets"]["books"]["path"] = "nowhere"
    with pytest.raises(DataError, match=r"^datasets\.books\+web: books: there are no tokens at nowhere"):
        open_split(crosstrain.load_config(workspace.config), "val")


def test_a_run_validates_on_the_files_of_that_split(workspace: Workspace, dataset: Path) -> None:
    text = write_text(workspace.path / "val.jsonl", documents=1, seed=5)
    near = str(workspace.path / "val")
    prepare(PrepareOptions(input=str(text), tokenizer=str(dataset / "tokenizer")), workspace.path / "val", False)
    part = {"name": "text", "path": str(dataset), "val": near, "seq_length": 32}
    losses = []
    for label, datasets in {"one": {"tiny": part}, "two": {"tiny": part, "other": part | {"split": [1, 1]}}}.items():
        workspace.config["datasets"] = datasets
        workspace.project.write_text(yaml.safe_dump(workspace.config))
        run = train(workspace.project, label, "run.max_iters=2", "run.eval_interval=2", "run.global_batch_size=4")
        losses.append(run.rows[-1]["val_loss"])
    alone = ("datasets.tiny.path=" + near, "datasets.tiny.val=null", "datasets.tiny.split=[0,1,0]")
    ((expected, *_),) = run_ranks(1, evaluate, str(workspace.path / "one" / "checkpoints" / "step_000002"), alone)
    assert losses[0] == pytest.approx(expected, rel=1e-6)  # batches of other sizes
    ((of_two, *_),) = run_ranks(1, evaluate, str(workspace.path / "two" / "checkpoints" / "step_000002"), ())
    assert losses[1] == pytest.approx(of_two, rel=1e-6)


def test_a_mixture_names_the_splits_that_all_its_parts_name(workspace: Workspace, dataset: Path) -> None:
    both = workspace.config["datasets"]["tiny"] | {"test": str(dataset)}
    one = {key: value for key, value in both.items() if key != "test"}
    for parts, named in (((both, both), ["test"]), ((both, one), []), ((both,), ["test"])):
        datasets = {"abc"[k]: dict(part) for k, part in enumerate(parts)}
        assert named_splits(load_config(workspace.config | {"datasets": datasets})) == named
