"""Train random combinations of a model and of layouts, and compare each layout with one process.

    python benchmarks/fuzz_layouts.py [--count 1000] [--seed 0] [--folder output/fuzz] [--only SEED]

A combination trains a few steps under one layout, some with a change of runner and ranks in between. Layouts that
`run.bitwise` supports must give the same bits as one process; others must agree with it within a tolerance, or be
refused in one sentence. Four layouts share the run of one process. A combination that fails is made as simple as it can
be while it still fails. Prints a table by dimension; failures.jsonl has every failure with its seed. Finished
combinations in the folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from common import ROOT, table
from forks import Refused, train
from tiny import LORA, MODELS, write_data, write_project

from crosstrain.checkpoint.digests import recorded
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.folders import find_checkpoint

STEPS = 4
LAYOUTS_PER_MODEL = 4
# Largest relative difference of a step's loss or gradient norm. In bf16, activations are rounded to 2**-9, and each
# layout rounds different partial sums.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
DATA = {"text": {}, "chat": {}, "pairs": {"objective": {"name": "dpo", "beta": 0.3}}}
SIMPLE_RUNNERS = [
    {"name": "ddp"}, {"name": "fsdp"}, {"name": "zero1"}, {"name": "zero2"}, {"name": "zero3"},
]  # fmt: skip


@dataclass(frozen=True)
class What:
    """What is trained; the first value of each list in `draw_what` is the simplest."""

    model: str
    data: str
    amp: str
    optimizer: str
    adapter: bool
    dropout: bool
    checkpointing: str
    batch: int
    micro_batch: int
    clip: float
    width: int
    seed: int
    slices: int = 0


@dataclass(frozen=True)
class How:
    """A layout: the runner and the ranks, and those of the steps after `change`."""

    bitwise: bool
    runner: str
    ranks: int
    change: int = 0  # step after which the run is resumed; 0: never
    next_runner: str = '{"name": "ddp"}'
    next_ranks: int = 1

    @property
    def layouts(self) -> str:
        """Both runners."""
        return self.runner + self.next_runner * bool(self.change)


ONE = '{"name": "ddp"}', 1
SIMPLEST = What("gpt2", "text", "fp32", "adamw", False, False, "none", 4, 1, 0.0, 0, 1)


def draw_what(rng: random.Random) -> What:
    model = rng.choice(list(MODELS))
    return What(
        model=model,
        data="shapes" if model == "images" else rng.choice(["text", "text", "chat", "pairs"]),
        amp=rng.choice(["fp32", "bf16"]),
        optimizer=rng.choice(["adamw", "adamw", "sgd", "muon"]),
        adapter=model != "images" and rng.random() < 0.25,
        dropout=rng.random() < 0.5,
        checkpointing=rng.choice(["none", "none", "full", "selective"]),
        batch=rng.choice([4, 8, 12]),
        micro_batch=rng.choice([1, 1, 2]),
        clip=rng.choice([0.0, 0.5]),
        width=rng.choice([0, 0, 2, 4]),
        seed=rng.randrange(1000),
        slices=rng.choice([0, 0, 2, 4]),
    )


def draw_runner(rng: random.Random, what: What) -> tuple[str, int]:
    """Return a runner that may suit, as JSON, and a number of ranks."""
    kind = rng.choice(["simple", "simple", "fsdp", "zero", "megatron", "megatron"])
    ranks = rng.choice([1, 2, 2, 3, 4])
    runner: dict[str, Any]
    if kind == "simple":
        runner = rng.choice(SIMPLE_RUNNERS)
    elif kind == "fsdp":
        options = [
            {"reshard_after_forward": False}, {"shard_size": 2}, {"sync_each_micro_batch": True}, {"cpu_offload": True},
            {"context_parallel": 2},
        ]  # fmt: skip
        runner = {"name": "fsdp", **rng.choice(options)}
    elif kind == "zero":
        runner = {"name": rng.choice(["zero2_offload", "zero3_offload"])}
    else:
        sizes = {
            "tensor_parallel": rng.choice([1, 2, 2, 4]), "pipeline_parallel": rng.choice([1, 1, 2]),
            "expert_parallel": rng.choice([1, 1, 2]), "context_parallel": rng.choice([1, 1, 1, 2]),
        }  # fmt: skip
        runner = {"name": "megatron"} | {name: size for name, size in sizes.items() if size > 1}
        if sizes["tensor_parallel"] > 1 and rng.random() < 0.3:
            runner["sequence_parallel"] = True
        if sizes["pipeline_parallel"] > 1:
            runner["pipeline_schedule"] = rng.choice(["1f1b", "gpipe"])
        if rng.random() < 0.25:
            runner["data_parallel_style"] = rng.choice(["zero1", "fsdp"])
        product = sizes["tensor_parallel"] * sizes["pipeline_parallel"]
        data = sizes["expert_parallel"] * sizes["context_parallel"]
        ranks = product * data * (rng.choice([1, 2]) if product * data <= 2 else 1)
        if ranks > 4:
            return draw_runner(rng, what)
    return json.dumps(runner), ranks


def draw_how(rng: random.Random, what: What, steps: int = STEPS) -> How:
    runner, ranks = draw_runner(rng, what)
    how = How(rng.random() < 0.8, runner, ranks)
    if rng.random() < 0.3:
        next_runner, next_ranks = draw_runner(rng, what)
        how = replace(how, change=rng.randrange(1, steps), next_runner=next_runner, next_ranks=next_ranks)
    return how


class Fuzzer:
    """Runs and judges combinations of `steps` steps in a folder."""

    def __init__(self, folder: Path, steps: int = STEPS) -> None:
        self.folder, self.steps = folder, steps
        self.data = write_data(folder / "data")
        self.references: dict[bool, tuple[What, Refused | None]] = {}  # bitwise or not -> what its run has trained

    def judge(self, what: What, how: How) -> str:
        """Return "equal", "close", "refused: SENTENCE" or "FAILED: REASON"."""
        if not how.bitwise and ("tensor_parallel" in how.layouts or "context_parallel" in how.layouts):
            what = replace(what, dropout=False)  # ranks that share samples draw their own random numbers
        try:
            one = self._one(what, how.bitwise)
            run = self._run(what, how, "run")
        except Refused as refusal:
            sentence = str(refusal)
            return f"refused: {sentence}" if "\n" not in sentence else f"FAILED: not one sentence: {sentence}"
        except RuntimeError as error:
            return f"FAILED: {str(error)[-1500:]}"
        if how.bitwise:
            mine, other = recorded(find_checkpoint(run)), recorded(find_checkpoint(one))
            equal = all(mine[key] == other[key] for key in ("weights", "moments"))
            return "equal" if equal else f"FAILED: {_differing(run, one)}"
        error = _difference(run, one)
        return "close" if error[0] <= TOLERANCE[what.amp] else f"FAILED: {error[1]} differs by {error[0]:.2g}"

    def _one(self, what: What, bitwise: bool) -> Path:
        """Train in one process, unless the last run in one process was the same."""
        name = "one_bitwise" if bitwise else "one"
        if self.references.get(bitwise, (None, None))[0] != what:
            refusal = None
            try:
                self._run(what, How(bitwise, *ONE), name)
            except Refused as error:
                refusal = error
            self.references[bitwise] = what, refusal
        refusal = self.references[bitwise][1]
        if refusal is not None:
            raise refusal
        return self.folder / name

    def _run(self, what: What, how: How, name: str) -> Path:
        run = self.folder / name
        shutil.rmtree(run, ignore_errors=True)
        project = self._project(what)
        parts = [(how.runner, how.ranks, how.change or self.steps)]
        if how.change:
            parts.append((how.next_runner, how.next_ranks, self.steps))
        parts_of = {"width": what.width, "slices": what.slices}
        on = {"mode": "on"} | {name: number for name, number in parts_of.items() if number}
        bitwise = json.dumps(on) if how.bitwise else "false"
        for runner, ranks, last in parts:
            options = [f"run.bitwise={bitwise}", f"run.runner={runner}", f"run.output_dir={run}"]
            train(project, [*options, f"run.max_iters={last}", f"run.lr_decay_iters={self.steps}"], ranks, seconds=120)
        return run

    def _project(self, what: What) -> Path:
        model = dict(MODELS[what.model])
        rate = 0.1 if what.dropout else 0.0
        if what.model == "gpt2":
            model["dropout"] = rate
        elif "config" in model:
            model["config"] = model["config"] | {"attention_dropout": rate}
        elif "qformer" in model:
            model["qformer"] = model["qformer"] | {"dropout": rate}
        if what.adapter:
            model["adapter"] = LORA | {"dropout": rate}
        run = {
            "device": "cpu", "amp": what.amp, "optimizer": what.optimizer, "global_batch_size": what.batch,
            "micro_batch_size": what.micro_batch, "grad_norm_clip": what.clip, "seed": what.seed, "save_interval": 1,
            "keep_last": 1, "init_lr": 3e-3, "log_interval": 1, "max_iters": self.steps,
            "gradient_checkpointing": what.checkpointing, **DATA.get(what.data, {}),
        }  # fmt: skip
        return write_project(self.folder / "project.yaml", model, self.data[what.data], run)

    def simplest(self, what: What, how: How) -> tuple[What, How, str]:
        """Return the simplest combination near this one that fails, and how it fails."""
        verdict = self.judge(what, how)
        again = True
        while again:
            again = False
            for simpler in _simpler(what, how):
                found = self.judge(*simpler)
                if found.startswith("FAILED"):
                    (what, how), verdict, again = simpler, found, True
                    break
        return what, how, verdict


def _simpler(what: What, how: How) -> Iterator[tuple[What, How]]:
    """Yield combinations in which one thing is simpler."""
    if how.change:
        yield what, replace(how, change=0)
        yield what, How(how.bitwise, how.next_runner, how.next_ranks)
    runner = json.loads(how.runner)
    for key in list(runner):
        if key != "name":
            yield what, replace(how, runner=json.dumps({k: v for k, v in runner.items() if k != key}))
    if how.ranks > 1:
        yield what, replace(how, ranks=how.ranks - 1)
    for field in fields(What):
        if (what.model, field.name) == ("images", "model"):
            continue
        simple = getattr(SIMPLEST, field.name)
        if getattr(what, field.name) != simple:
            simpler = replace(what, **{field.name: simple})
            # Images belong to their model, so the data change with it.
            yield replace(simpler, model=SIMPLEST.model) if field.name == "data" else simpler, how


def _weights(run: Path) -> dict[str, torch.Tensor]:
    reader = Reader.open(find_checkpoint(run))
    return {name: reader.whole("param", name) for name in reader.names("param")}


def _differing(run: Path, one: Path) -> str:
    mine, other = _weights(run), _weights(one)
    names = [name for name in other if not torch.equal(mine[name], other[name])]
    return f"{len(names)} of {len(other)} weights differ: {', '.join(names[:3])}"


def _metrics(run: Path) -> dict[str, float]:
    """Return the loss and the gradient norm of each step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {f"{key} of step {row['step']}": row[key] for row in rows if "loss" in row for key in ("loss", "grad_norm")}


def _difference(run: Path, one: Path) -> tuple[float, str]:
    """Return the largest relative difference of a metric, and the name of the metric."""
    mine, other = _metrics(run), _metrics(one)
    found = {name: abs(mine[name] - other[name]) / (abs(other[name]) + 1e-6) for name in other}
    worst = max(found, key=lambda name: found[name])
    return found[worst], worst


def _runner_words(how: How) -> str:
    runner = json.loads(how.runner)
    options = [f"{key}={value}" for key, value in runner.items() if key not in ("name", "pipeline_schedule")]
    return " ".join([runner["name"], *options])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first combination")
    parser.add_argument("--folder", type=Path, default=ROOT / "output" / "fuzz")
    parser.add_argument("--only", type=int, help="judge the combinations of one seed, and print them")
    arguments = parser.parse_args()
    fuzzer = Fuzzer(arguments.folder)
    results = arguments.folder / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    seeds = range(arguments.seed, arguments.seed + -(-arguments.count // LAYOUTS_PER_MODEL))
    for seed in seeds if arguments.only is None else [arguments.only]:
        if arguments.only is None and any(row["seed"] == seed for row in done):
            continue
        rng = random.Random(seed)
        what = draw_what(rng)
        for how in [draw_how(rng, what) for _ in range(LAYOUTS_PER_MODEL)]:
            start, verdict = time.monotonic(), fuzzer.judge(what, how)
            row = {"seed": seed, "verdict": verdict, "what": asdict(what), "how": asdict(how)}
            if verdict.startswith("FAILED"):
                smallest, layout, found = fuzzer.simplest(what, how)
                row["smallest"] = {"what": asdict(smallest), "how": asdict(layout), "verdict": found}
            print(f"{time.monotonic() - start:5.1f} s", json.dumps(row), flush=True)
            if arguments.only is None:
                done.append(row)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(_table(done))


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the counts of verdicts by value of each dimension."""
    lines = []
    for dimension in (
        "model",
        "data",
        "amp",
        "optimizer",
        "adapter",
        "checkpointing",
        "width",
        "slices",
        "bitwise",
        "runner",
    ):
        found: dict[str, Counter[str]] = {}
        for row in rows:
            value = (
                _runner_words(How(**row["how"]))
                if dimension == "runner"
                else str((row["what"] | row["how"])[dimension])
            )
            found.setdefault(value, Counter())[row["verdict"].partition(":")[0]] += 1
        for value in sorted(found):
            counts = found[value]
            lines.append([dimension, value, *(counts[v] for v in ("equal", "close", "refused", "FAILED"))])
    return table(["dimension", "value", "equal", "close", "refused", "failed"], lines)


if __name__ == "__main__":
    main()
