"""Every exhibit of the museum shows the bug that it says, measured without `compare`: an exhibit that does nothing
would prove nothing about the tool that passes it."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import sys
import typing
import zlib
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ROOT
from crosstrain import Callback
from crosstrain.training.saving import Saving
from crosstrain.training.validation import Validation
from crosstrain.utils.errors import CheckpointError
from crosstrain.utils.types import Step
from fixtures_ranks import make_trainer, run_ranks

MUSEUM = ROOT / "benchmarks" / "museum"
FILES = sorted(path for path in MUSEUM.glob("*.py") if not path.name.startswith("__"))
SICK = [path.stem for path in FILES if not path.stem.startswith("healthy_")]
HEALTHY = [path.stem for path in FILES if path.stem.startswith("healthy_")]

RESUMED = 2  # steps after the resumption
FAINT = 1e-7  # relative; what the exhibit's base computes comes out again bit by bit


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_exhibit_says_its_bug_thread_and_right_answer(path: Path) -> None:
    tree = ast.parse(path.read_text())
    bug, _, link = (ast.get_docstring(tree) or "").partition("\n\n")
    assert bug.endswith(".")
    names = [d.args[0].value for c in tree.body if isinstance(c, ast.ClassDef) for d in c.decorator_list]  # type: ignore
    assert names == [path.stem]
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "EXPECTED"]  # type: ignore
    (call,) = [node.value for node in assigned]
    assert isinstance(call, ast.Call)
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    if path.stem in HEALTHY:
        assert not call.args
        return
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(pull|issues)/\d+", link)
    assert keywords["cause"]
    re.compile(keywords["cause"])
    assert len(path.read_text().splitlines()) <= 45


def test_the_page_shows_an_exhibit_as_it_is() -> None:
    page = (ROOT / "docs" / "museum.md").read_text()
    assert f"```python\n{(MUSEUM / 'norms_decay.py').read_text()}```" in page


def test_the_museum_is_large_enough() -> None:
    assert len(SICK) >= 114
    assert len(HEALTHY) >= 12


# ---- what an exhibit does, step by step, as its ranks see it

Event = tuple[int, str]  # step and phase
Values = dict[tuple[str, str], np.ndarray]  # by tensor, and its place


def _held(shards: list[Any], scale: float = 1.0) -> Values:
    return {
        (f"{shard.name}", f"{shard.kind} {piece.box}"): piece.data.detach().float().numpy() / scale
        for shard in shards
        for piece in shard.pieces
    }


def _number(value: float) -> Values:
    return {("", ""): np.array(value, np.float64)}


def _content(batch: Any) -> int:
    fields = ("input_ids", "sampled")  # `sampled`: log-probabilities of a policy's own samples
    arrays = [micro.data[name].numpy() for micro in batch for name in fields if name in micro.data]
    return zlib.crc32(b"".join(array.tobytes() for array in arrays))


def follow(project: str, options: tuple[str, ...], steps: int) -> dict[Event, Values]:
    """Run on each rank: evaluate, train, evaluate and save."""
    trainer = make_trainer(project, options, bare=True)
    runner, events = trainer.runner, dict[Event, Values]()

    def observe(batch: Step, loss: float) -> None:
        assert runner.optimizer is not None
        step = trainer.state.step + 1
        events[step, "gradients"] = _held(runner.held.gradients(), runner.gradient_scale)
        rates = np.unique([group["lr"] for group in runner.optimizer.param_groups])
        events[step, "learning rate"] = {("", ""): rates}

    observer = Callback(None, trainer)
    observer.after_backward = observe  # type: ignore[method-assign]
    trainer.hooks.callbacks["observer"] = observer
    events[0, "evaluation"] = _number(Validation(None, trainer).measure(trainer.val_dataset).loss)
    for step, batch in zip(range(1, steps + 1), trainer.batches(), strict=False):
        metrics = trainer.train_step(iter([batch]))
        assert metrics is not None
        events[step, "samples"] = _number(_content(batch))
        events[step, "forward"] = _number(metrics.loss)
        events[step, "norm"] = _number(metrics.grad_norm)
        shards = runner.held.shards()
        events[step, "update"] = _held([shard for shard in shards if shard.kind == "param"])
        events[step, "state"] = _held([shard for shard in shards if shard.kind != "param"])
    events[steps, "evaluation"] = _number(Validation(None, trainer).measure(trainer.val_dataset).loss)
    try:
        Saving(None, trainer).save(background=False)
    except CheckpointError as error:  # that nothing can be saved is an effect too
        events[steps, "export"] = {("", repr(error)): np.zeros(())}
        return events
    files = trainer.checkpointer.root.glob(f"step_*{steps}/*.json")
    documents = [path for path in files if path.name not in ("manifest.json", "state.json")]
    events[steps, "export"] = {("", path.name): np.array(zlib.crc32(path.read_bytes())) for path in documents}
    runner.close()
    return events


def go_on(project: str, options: tuple[str, ...]) -> dict[Event, Values]:
    """Run on each rank: train on from the checkpoint."""
    events: dict[Event, Values] = {}
    try:
        trainer = make_trainer(project, options, bare=True)
    except CheckpointError as error:
        return {(0, "resume"): {("", repr(error)): np.zeros(())}}
    for _, batch in zip(range(RESUMED), trainer.batches(), strict=False):
        metrics = trainer.train_step(iter([batch]))
        assert metrics is not None
        events[trainer.state.step, "resume"] = _number(metrics.loss) | {
            ("", "data"): np.array(_content(batch)),
            **_held([s for s in trainer.runner.held.shards() if s.kind == "param"]),
        }
    trainer.runner.close()
    return events


ORDER = [
    "samples",
    "forward",
    "gradients",
    "norm",
    "learning rate",
    "update",
    "state",
    "resume",
    "evaluation",
    "export",
]


def in_order(event: Event) -> tuple[int, int]:
    """Evaluation and export come after all training."""
    step, phase = event
    return (10**6 if phase in ("resume", "export") or (phase == "evaluation" and step) else step), ORDER.index(phase)


def differences(mine: list[dict[Event, Values]], theirs: list[dict[Event, Values]]) -> dict[Event, dict[str, float]]:
    """For each event the tensors that differ on some rank, with their relative difference."""
    found: dict[Event, dict[str, float]] = {}
    for ours, others in zip(mine, theirs, strict=True):
        for event in ours.keys() | others.keys():
            a, b = ours.get(event, {}), others.get(event, {})
            names = found.setdefault(event, {})
            for key in a.keys() | b.keys():
                size = np.inf
                if key in a and key in b and a[key].shape == b[key].shape:
                    size = np.linalg.norm(a[key] - b[key]) / max(np.linalg.norm(b[key]), 1e-30)
                if size > FAINT:
                    names[key[0]] = max(names.get(key[0], 0.0), size)
    return {event: found[event] for event in sorted(found, key=in_order) if found[event]}


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("museum")
    return run_ranks(1, _write_projects, str(folder))[0]


def _write_projects(folder: str) -> dict[str, Any]:
    sys.path.insert(0, str(MUSEUM.parent))
    from museum.__main__ import exhibits, write_projects  # type: ignore[import-not-found]

    paths = {name: str(path) for name, path in write_projects(Path(folder)).items()}
    return paths | {exhibit.name: asdict(exhibit.expected) for exhibit in exhibits()}


@cache
def followed(runner: str, options: str, project: str, steps: int) -> list[dict[Event, Values]]:
    folder = Path(project).parent / f"{Path(project).stem}_{runner}_{steps}_{zlib.crc32(options.encode())}"
    choice = json.dumps({"name": runner, **json.loads(options)})
    given = (f"run.output_dir={folder}", f"run.runner={choice}", "run.eval_interval=1000", "run.eval_iters=2")
    begun, resumed = run_ranks(2, follow, project, given, steps), run_ranks(2, go_on, project, given)
    return [events | later for events, later in zip(begun, resumed, strict=True)]


def compared(name: str, projects: dict[str, Any]) -> tuple[dict[str, Any], dict[Event, dict[str, float]], int]:
    expected = projects[name]
    options = json.dumps(expected["options"])
    place, steps = projects[expected["project"]], expected["steps"]
    base = followed(expected["base"], options, place, steps)
    found = differences(followed(name, options, place, steps), base)
    return expected, found, len({tensor for tensor, _ in base[0][1, "gradients"]})


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_an_exhibit_shows_its_bug_where_it_says(name: str, projects: dict[str, Any]) -> None:
    expected, found, tensors = compared(name, projects)
    assert found, "it does nothing"
    (step, phase), wrong = next(iter(found.items()))
    if step == 0:  # the loss before training; where training's own differs too, that is what is wrong
        phase = next((later for at, later in found if at == 1 and later in ("samples", "forward")), phase)
    if phase == "update" and not any(later[1] in ("forward", "gradients") for later in found):
        phase = "state"  # what is saved is not what trains
    assert phase == expected["phase"], {event: (len(names), max(names.values())) for event, names in found.items()}
    if phase in ("gradients", "update", "state"):
        if expected["parameter"] is not None:
            assert {name for name in wrong if not fnmatch.fnmatch(name, expected["parameter"])} == set()
        else:
            assert len(wrong) > tensors / 2, sorted(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_variant_differs_by_rounding_alone(name: str, projects: dict[str, Any]) -> None:
    _, found, _ = compared(name, projects)
    for (_, phase), wrong in found.items():
        assert phase not in ("samples", "learning rate", "export")
        if phase in ("forward", "norm", "evaluation"):
            assert max(wrong.values()) < 1e-5  # Adam makes roundings of 1e-7 larger from step to step


def test_phases_have_an_order() -> None:
    source = ast.parse((MUSEUM / "__init__.py").read_text())
    (phases,) = [
        typing.cast(ast.Subscript, node.value).slice
        for node in source.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "Phase"  # type: ignore[attr-defined]
    ]
    assert sorted(ast.literal_eval(phases)) == sorted(ORDER)
