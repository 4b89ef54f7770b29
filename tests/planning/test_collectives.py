"""A step's collectives, followed without ranks: equal to those of real ones, and what does not match is named."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
import torch
import yaml
from crosstrain_plugins.builtin.commands.plan.collectives import Collectives
from crosstrain_plugins.builtin.commands.plan.estimate import Project
from crosstrain_plugins.builtin.commands.plan.follow import Recorder

from crosstrain.cli.main import main
from crosstrain.config.load import load_config
from crosstrain.engine.build import batch_plan, make_model, make_runner
from crosstrain.training.preflight import dry_run
from fixtures_ranks import mostly_slow, run_ranks

MODEL = {"arch": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 300}
# Two stages of four copies: the first sends, then all copies sum four tensors, and all ranks two numbers.
RUNNER = """
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from crosstrain import Runner, registry

@registry.register_runner("two_stages")
class TwoStages(Runner):
    @dataclass
    class Options:
        mistake: str = "none"

    def setup(self):
        super().setup()
        self.mesh = init_device_mesh("cpu", (2, self.world.size // 2), mesh_dim_names=("stage", "copy"))

    def optimizer_step(self, apply=True):
        mistake, rank, stage = self.options.mistake, self.world.rank, self.mesh.get_local_rank("stage")
        hidden = torch.zeros(2, 8 if mistake == "shape" and stage else 4)
        if stage == 0:
            dist.send(hidden, group=self.mesh.get_group("stage"), group_dst=1)  # sends
        else:
            dist.recv(hidden, group=self.mesh.get_group("stage"), group_src=0)  # receives
        copies = self.mesh.get_group("copy")
        for layer in range(4):
            if mistake == "missing" and rank == 5 and layer == 2:
                continue
            dist.all_reduce(torch.zeros(3), group=copies)  # gradients
        first, second = (self.stages, self.copies)[:: -1 if mistake == "order" and rank == 6 else 1]
        first()
        second()
        return super().optimizer_step(apply)

    def copies(self):
        dist.all_reduce(torch.zeros(5), group=self.mesh.get_group("copy"))  # copies

    def stages(self):
        dist.all_reduce(torch.zeros(5), group=self.mesh.get_group("stage"))  # stages
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collectives")
    (folder / "two_stages.py").write_text(RUNNER)
    text = {"name": "text", "path": str(folder / "data"), "seq_length": 16, "split": [98, 1, 1]}
    run = {"output_dir": str(folder / "out"), "max_iters": 2, "micro_batch_size": 1, "accum_grad_iters": 1,
           "optimizer": "adamw", "init_lr": 0.001, "device": "cpu", "plugins": [str(folder / "two_stages.py")],
           "runner": "ddp", "amp": "bf16"}  # fmt: skip
    document = {"model": MODEL | {"dropout": 0.1}, "datasets": {"some": text}, "run": run}
    (folder / "project.yaml").write_text(yaml.safe_dump(document))
    return folder


def _project(path: Path, size: int, *options: str) -> Project:
    config = load_config(path, options)
    ready = dry_run(config, size)
    return Project(config, ready.model, ready.sample)


def _line(text: str) -> int:
    return next(n for n, line in enumerate(RUNNER.splitlines(), 1) if line.endswith(f"# {text}"))


def _mistake(folder: Path, mistake: str) -> Collectives:
    options = f"run.runner={{name: two_stages, mistake: {mistake}}}"
    return Collectives.of(_project(folder / "project.yaml", 8, options), 8)


# ---- mistakes


def test_ranks_that_decide_alike_are_followed_once(folder: Path) -> None:
    found = _mistake(folder, "none")
    assert [program.ranks for program in found.programs] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not found.mismatches


def test_a_rank_that_leaves_a_call_out_is_named(folder: Path) -> None:
    found = _mistake(folder, "missing")
    assert [program.ranks for program in found.programs] == [[0, 1, 2, 3], [4, 6, 7], [5]]
    (text,) = found.mismatches
    # Of four equal calls, the last is the one that has no partner.
    assert text.startswith("copy, call 4: rank 5 never entered all_reduce of float32 [3], which ranks 4, 6 and 7 call")
    assert f"two_stages.py:{_line('gradients')} in optimizer_step" in text


def test_a_stage_that_expects_another_shape_is_named(folder: Path) -> None:
    (text,) = _mistake(folder, "shape").mismatches
    assert text.startswith("stage, from rank 0, call 1: ")
    assert all(f"message of float32 [2, {width}]" in text for width in (4, 8))
    assert all(f"two_stages.py:{_line(end)} " in text for end in ("sends", "receives"))


def test_a_rank_with_another_order_of_groups_is_named(folder: Path) -> None:
    (text,) = _mistake(folder, "order").mismatches
    assert "rank 6 " in text
    assert all(f"two_stages.py:{_line(end)} " in text for end in ("copies", "stages"))


def test_the_command_prints_a_table_and_fails_where_calls_do_not_match(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--cfg-path", str(folder / "project.yaml"), "--world-size", "8", "--no-presets", "--collectives"]
    command += ["--output", str(folder / "plan.json"), "--options"]
    assert main([*command, "run.runner=ddp"]) == 0
    assert "calls match on all ranks (8)" in capsys.readouterr().out
    (folder / "plan.json").unlink()
    assert main([*command, "run.runner={name: two_stages, mistake: missing}"]) == 1
    shown = capsys.readouterr().out
    document = json.loads((folder / "plan.json").read_text())["collectives"]
    assert document["mismatches"][0] in shown
    assert document["programs"][2]["ranks"] == [5]
    sums = next(row for row in document["programs"][2]["calls"] if row["group"] == "copy")
    assert (sums["kind"], sums["size"], sums["calls"], sums["sent"]) == ("all_reduce", 4, 4, 3 * 18 + 30)


# ---- a thousand ranks

PLANTED = """
from dataclasses import dataclass

import torch
import torch.distributed as dist
from crosstrain import registry

Megatron = registry.get("runner", "megatron")

@registry.register_runner("planted")
class Planted(Megatron):
    @dataclass
    class Options(Megatron.Options):
        mistake: str = "missing"

    def setup(self):
        super().setup()
        state = self.rng.state
        if self.options.mistake == "shape" and self.stages.rank == 5:
            self.rng.state = lambda: torch.cat([state(), state()[:8]])

    def gradient_norm(self, gradients):
        if self.options.mistake == "missing" and self.world.rank == 517:
            return 1.0
        return super().gradient_norm(gradients)

    def update(self):
        groups = [self.mesh.get_group(name) for name in ("data", "tensor")]
        if self.options.mistake == "order" and dist.get_rank() == 700:
            groups.reverse()
        for group in groups:
            dist.all_reduce(torch.zeros(3), group=group)
        super().update()
"""
SPREAD = "tensor_parallel: 8, sequence_parallel: true, pipeline_parallel: 16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "odd", "parts"),
    [
        ("missing", 517, ["world, call ", "rank 517 never entered all_reduce of float64 [2]", "in gradient_norm"]),
        ("shape", 320, ["pipeline, from rank 256, call 2: ", "message of uint8 [5064]", "message of uint8 [5056]"]),
        ("order", 700, ["order of groups: on rank 700 all_reduce", "planted.py:32 in update) on tensor comes before"]),
    ],
)
def test_a_mistake_on_one_of_a_thousand_ranks_is_named(folder: Path, mistake: str, odd: int, parts: list[str]) -> None:
    (folder / "planted.py").write_text(PLANTED)
    options = [f"run.runner={{name: planted, {SPREAD}, mistake: {mistake}}}", "model.n_layer=16", "model.n_head=8",
               f"run.plugins=[{folder}/planted.py]", "run.accum_grad_iters=16"]  # fmt: skip
    found = Collectives.of(_project(folder / "project.yaml", 1024, *options), 1024)
    assert sorted(rank for program in found.programs for rank in program.ranks) == list(range(1024))
    assert odd in [program.ranks[0] for program in found.programs]
    assert all(part in found.mismatches[0] for part in parts), found.mismatches


@pytest.mark.slow
@pytest.mark.timeout(900)  # 150 seconds of a core, beside other tests
def test_the_ranks_of_gpt3_175b_match_and_send_what_the_plan_says() -> None:
    begin = time.process_time()
    project = _project(Path(__file__).parents[2] / "projects" / "gpt3_175b.yaml", 1024)
    found = Collectives.of(project, 1024)
    assert not found.mismatches
    # A kind of rank for each stage, and of the last stage's one for the ranks that hold the vocabulary's padding.
    assert [len(program.ranks) for program in found.programs] == [64] * 15 + [56, 8]
    assert time.process_time() - begin < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20  # KiB
    sent = max(sum(call.sent for call in program.calls) for program in found.programs)
    # The plan leaves out what is small: the norm, the tied embedding, and the state of random numbers between stages.
    assert sent == pytest.approx(project.estimate(project.config, 1024).sent, rel=0.001)


# ---- against real ranks

LAYOUTS = {
    "ddp": (2, "ddp", ["run.accum_grad_iters=2"]),
    "fsdp": (2, "fsdp", ["run.accum_grad_iters=2", "run.gradient_checkpointing=full"]),
    "fsdp hybrid": (4, "{name: fsdp, shard_size: 2}", []),
    "tensor and pipeline": (4, "{name: megatron, tensor_parallel: 2, pipeline_parallel: 2, sequence_parallel: true}",
                            ["run.accum_grad_iters=7", "run.gradient_checkpointing=full"]),
    "tensor and zero1": (4, "{name: megatron, tensor_parallel: 2, data_parallel_style: zero1, bucket_mb: 1}", []),
    "tensor and fsdp": (4, "{name: megatron, tensor_parallel: 2, data_parallel_style: fsdp}", []),
    "pipeline and data": (4, "{name: megatron, pipeline_parallel: 2, pipeline_schedule: gpipe}",
                          ["run.accum_grad_iters=3"]),
}  # fmt: skip
Seen = tuple[str, int, str, int | None, int]


def _really(path: str, options: list[str], size: int) -> list[Seen]:
    """The calls of this rank's first step, in real process groups."""
    config = load_config(path, options)
    plan, runner, recorder = batch_plan(config, size), make_runner(config), Recorder()
    runner.setup()
    rows = torch.zeros(plan.micro_batch, 16, dtype=torch.long)
    inputs = {key: rows for key in dry_run(config, size).sample or {}}
    recorder.step(config, runner, lambda: make_model(config), inputs, plan.accumulation)
    # Before its first step, torch's pipeline agrees by messages of one integer; in a fake group it does without.
    calls = [call for call in recorder.calls if call.tensor != "int32 [1]"]
    return [(call.kind, call.ranks, call.tensor, call.peer, call.sent) for call in calls]


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, ["tensor and pipeline"]))
def test_the_calls_are_those_of_real_ranks(folder: Path, name: str) -> None:
    size, runner, more = LAYOUTS[name]
    options = [f"run.runner={runner}", *more]
    found = Collectives.of(_project(folder / "project.yaml", size, *options), size)
    assert not found.mismatches
    real = run_ranks(size, _really, str(folder / "project.yaml"), options, size)
    run = {rank: program for program in found.programs for rank in program.ranks}
    for rank in range(size):
        assert [(c.kind, c.ranks, c.tensor, c.peer, c.sent) for c in run[rank].calls] == real[rank]
