"""Log-likelihoods are computed once for each model, pair and layout."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from crosstrain.config.registry import registry
from crosstrain.distributed.group import Group

remembered = import_module(registry.get("evaluation", "tasks").__module__.rpartition(".")[0] + ".remembered")
Pair = tuple[list[int], list[int]]
ALONE = Group()


def ask(key: str | None, pairs: list[Pair]) -> tuple[list[Any], list[Pair]]:
    """The answers about pairs, and the pairs that were computed."""
    computed: list[Pair] = []

    def compute(new: list[Pair]) -> list[tuple[float, bool]]:
        computed.extend(new)
        return [(-0.1 * sum(continuation), len(context) > 1) for context, continuation in new]

    return remembered.Remembered(key, ALONE).of(pairs, compute), computed


FIRST: list[Pair] = [([1, 2], [3]), ([1], [2, 3]), ([1, 2], [3])]


def test_a_repeated_evaluation_computes_only_new_pairs(home: Path) -> None:
    answers, computed = ask("a", FIRST)
    assert computed == FIRST[:2], "a pair that is asked twice is computed once"
    assert answers == [(-0.1 * 3, True), (-0.1 * 5, False), (-0.1 * 3, True)]
    assert ask("a", FIRST) == (answers, [])
    assert ask("a", [*FIRST, ([9], [9])]) == ([*answers, (-0.1 * 9, False)], [([9], [9])])


def test_other_models_and_models_without_a_key_share_nothing(home: Path) -> None:
    ask("a", FIRST)
    assert ask("b", FIRST)[1] == FIRST[:2]
    assert ask(None, FIRST)[1] == FIRST[:2]
    assert ask(None, FIRST)[1] == FIRST[:2]
    assert len([*(home / "cache").rglob("*.jsonl")]) == 2


def test_a_half_written_line_is_computed_again(home: Path) -> None:
    answers, _ = ask("a", FIRST)
    (file,) = (home / "cache").rglob("*.jsonl")
    file.write_text(file.read_text()[:-20])
    assert ask("a", FIRST) == (answers, [FIRST[1]])


def test_the_key_has_the_weights_the_arithmetic_and_the_layout(tmp_path: Path) -> None:
    run = {"amp": "fp32", "runner": "ddp", "bitwise": False, "threads": 1, "device": "cpu"}

    def key(manifest: str = "m", size: int = 1, weights: str | None = None, **other: Any) -> str | None:
        (tmp_path / "manifest.json").write_text(manifest)
        plain = {"model": {"arch": other.pop("arch", "gpt2")}, "run": run | other}
        model = SimpleNamespace(
            checkpoint=tmp_path,
            config=SimpleNamespace(plain=plain),
            runner=SimpleNamespace(world=SimpleNamespace(size=size)),
        )
        return remembered.key_of(model, weights)

    others: list[dict[str, Any]] = [
        {}, {"manifest": "n"}, {"size": 2}, {"weights": "ema"}, {"arch": "qwen"}, {"amp": "bf16"}, {"runner": "fsdp"},
    ]  # fmt: skip
    assert len({key(**other) for other in others}) == len(others)
