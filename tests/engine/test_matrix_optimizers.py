"""Optimizers of whole matrices: the same update, to the bit, wherever the parts of a matrix are."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crosstrain_plugins.builtin.optimizers.matrix_optimizer import Holdings, assign_owners

from conftest import ROOT, Workspace
from crosstrain import Box, Group, Shard, registry, whole_pieces
from fixtures_docs import blocks, is_plugin
from fixtures_moe import mixture
from fixtures_ranks import make_trainer, mostly_slow, run_ranks
from fixtures_training import compare, project, sized

# Widths of 18 and 9 on ranks, which fill no vector register, and ranges of ZeRO that begin within a row.
GPT2 = ("model.n_embd=36", "model.dropout=0")
OPTIONS = ("run.max_iters=3", "run.min_lr=5e-3", "run.micro_batch_size=1", "run.global_batch_size=12",
           "run.grad_norm_clip=0")  # fmt: skip
MUON = "run.optimizer={name: muon, adamw_lr_scale: 0.5, ns_dtype: %s}"
Tensors = dict[str, np.ndarray]


def gradient_of(name: str, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name}{step}".encode())))


def _parts(runner: Any, kinds: tuple[str, ...]) -> list[tuple[str, tuple[int, ...], Any]]:
    return [
        (
            f"{shard.kind} {shard.name}",
            shard.shape,
            [(piece.box.offset, piece.box.shape, piece.data.numpy().copy()) for piece in shard.pieces],
        )
        for shard in runner.held.shards()
        if not kinds or shard.kind in kinds
    ]


def _train(project: str, options: tuple[str, ...]) -> tuple[Any, Any, list[float]]:
    """Train with gradients that are the same wherever they are computed."""
    trainer = make_trainer(project, options)
    runner = trainer.runner
    optimizer, rates, plain_step = runner.optimizer, list[float](), runner.optimizer.step

    def step() -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p in parameters:
            optimizer.state[p]["given"] = p.grad
        for shard in runner.held.shards():
            for piece in shard.pieces if shard.kind == "given" else []:
                whole = gradient_of(shard.name, trainer.state.step, shard.shape)
                piece.data.copy_(whole[piece.box.slices_in(type(piece.box).whole(shard.shape))])
        for p in parameters:
            del optimizer.state[p]["given"]
        rates.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0].get("lr_scale", 1.0))
        plain_step()

    before = _parts(runner, ("param",))
    optimizer.step = step
    trainer.fit()
    after = _parts(runner, ())
    runner.close()
    return before, after, rates


def whole(ranks: list[Any]) -> Tensors:
    out: Tensors = {}
    for parts in ranks:
        for name, shape, pieces in parts:
            array = out.setdefault(name, np.full(shape, np.nan, np.float32))
            for offset, extent, data in pieces:
                array[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] = data
    assert not any(np.isnan(array).any() for array in out.values()), "a part is nowhere"
    return out


def trained(workspace: Workspace, name: str, *options: str) -> tuple[Tensors, Tensors, list[float]]:
    runner, size = sized(name)
    folder = f"run.output_dir={workspace.path}/{zlib.crc32(f'{name}{options}'.encode())}"
    ranks = run_ranks(size, _train, str(workspace.project), (folder, f"run.runner={runner}", *OPTIONS, *options))
    return whole([before for before, _, _ in ranks]), whole([after for _, after, _ in ranks]), ranks[0][2]


@pytest.fixture(scope="module", params=mostly_slow(["bf16", "fp32"], ["bf16"]))
def one_process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    workspace = Workspace(tmp_path_factory.mktemp("muon"), dataset)
    options = (MUON % request.param, *GPT2)
    return workspace, options, trained(workspace, "ddp@1", *options)


@pytest.fixture(scope="module")
def one_process_of_a_mixture(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    workspace = project(Workspace(tmp_path_factory.mktemp("mixture"), dataset), mixture("qwen3_moe"))
    options = (MUON % "bf16",)
    return workspace, options, trained(workspace, "ddp@1", *options)


LAYOUTS = [
    "ddp@2", "fsdp@2", "fsdp@3", "zero1@2", "zero2@2", "zero3@2", "zero2_offload@2", "zero3_offload@2",
    "megatron_tp2@2", "megatron_pp2@2", "megatron_tp2_zero1@4", "megatron_tp2_fsdp@4", "megatron_tp2_pp2@4",
    "megatron_cp2@2", "{name: fsdp, context_parallel: 2}@2",
]  # fmt: skip
EXPERTS = ["ddp@2", "megatron_ep2@2", "megatron_ep2_fsdp@2", "zero3@2", "megatron_tp2_ep2@4", "megatron_ep2_zero1@4"]


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, ["fsdp@2"]))
def test_muon_updates_alike_to_the_bit_under_every_layout(one_process: Any, layout: str) -> None:
    assert_equal_updates(*one_process, layout, matrices=8)


@pytest.mark.parametrize("layout", mostly_slow(EXPERTS, []))
def test_experts_are_updated_alike_to_the_bit_wherever_they_are(one_process_of_a_mixture: Any, layout: str) -> None:
    assert_equal_updates(*one_process_of_a_mixture, layout, matrices=14)


def assert_equal_updates(workspace: Workspace, options: Any, one: Any, layout: str, matrices: int) -> None:
    before, after, rates = one
    there, now, same = trained(workspace, layout, *options)
    assert sorted({*same}) == sorted({*rates})
    assert (there.keys(), now.keys()) == (before.keys(), after.keys())
    assert all(np.array_equal(there[name], before[name]) for name in before)
    other = [name for name in after if not np.array_equal(now[name], after[name])]
    by_muon = {name.partition(" ")[2] for name in after if name.startswith("momentum_buffer")}
    assert len(by_muon) == matrices
    assert [name for name in other if name.partition(" ")[2] in by_muon] == []
    for name in other:  # AdamW's kernel rounds the last elements of a tensor, which fill no register, otherwise
        np.testing.assert_allclose(now[name], after[name], rtol=1e-5, atol=1e-8, err_msg=name)


def test_muon_is_torchs_own_to_the_bit(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, options, (before, after, rates) = one_process
    if "fp32" in options[0]:  # for which torch has no option
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    names = sorted(name.partition(" ")[2] for name in after if name.startswith("momentum_buffer"))
    weights = [torch.nn.Parameter(torch.from_numpy(before[f"param {name}"].copy())) for name in names]
    muon = torch.optim.Muon(weights, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step, rate in enumerate(rates):
        muon.param_groups[0]["lr"] = rate
        for name, weight in zip(names, weights, strict=True):
            weight.grad = gradient_of(name, step, tuple(weight.shape))
        muon.step()
    for name, weight in zip(names, weights, strict=True):
        assert np.array_equal(weight.detach().numpy(), after[f"param {name}"]), name
        assert np.array_equal(muon.state[weight]["momentum_buffer"].numpy(), after[f"momentum_buffer {name}"]), name


@pytest.mark.slow
def test_a_run_that_each_step_resumes_under_another_layout_is_the_same_to_the_bit(one_process: Any) -> None:
    workspace, options, _ = one_process
    layouts = [
        "zero1@2", "fsdp@3", "megatron_cp2@2", "megatron_tp2_zero1@4", "zero3@2", "megatron_tp2_pp2@4", "zero2@2",
    ]  # fmt: skip
    _, after, _ = trained(workspace, "ddp@1", *options, "run.max_iters=8")
    folder = f"run.output_dir={workspace.path}/wandering{zlib.crc32(str(options).encode())}"
    for step, layout in enumerate([*layouts, "ddp@1"], 1):
        runner, size = sized(layout)
        more = (*OPTIONS, *options, f"run.max_iters={step}", "run.lr_decay_iters=8")
        ranks = run_ranks(size, _train, str(workspace.project), (folder, f"run.runner={runner}", *more))
    now = whole([parts for _, parts, _ in ranks])
    assert now.keys() == after.keys()
    matrices = {name.partition(" ")[2] for name in after if name.startswith("momentum_buffer")}
    assert [n for n in after if n.partition(" ")[2] in matrices and not np.array_equal(now[n], after[n])] == []


@pytest.mark.slow
def test_compare_knows_the_rounding_of_muon(tmp_path: Path, dataset: Path) -> None:
    done = compare(
        Workspace(tmp_path, dataset),
        "ddp@1",
        "fsdp@2",
        "zero1@2",
        "megatron_tp2@2",
        options=("run.optimizer=muon", "model.dropout=0"),
    )
    assert "all train like ddp@1" in done.stdout, done.stdout


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, []))
def test_a_plugin_with_state_of_whole_matrices_updates_alike(tmp_path: Path, dataset: Path, layout: str) -> None:
    workspace = Workspace(tmp_path, dataset)
    (shown,) = [b for b in blocks("python", page=ROOT / "docs" / "plugins.md") if is_plugin(b) and "Matrix" in b.text]
    (tmp_path / "shown.py").write_text(shown.text)
    options = (*GPT2, "run.optimizer=shampoo", f"run.plugins=[{tmp_path}/shown.py]")
    (before, after, _), (there, now, _) = (trained(workspace, name, *options) for name in ("ddp@1", layout))
    assert (there.keys(), now.keys()) == (before.keys(), after.keys())
    assert after["left transformer.h.0.mlp.c_fc.weight"].shape == (36, 36)
    matrices = {name.partition(" ")[2] for name in after if name.startswith("left")}
    assert [n for n in after if n.partition(" ")[2] in matrices and not np.array_equal(now[n], after[n])] == []


def test_owners_share_the_work_and_every_part_is_sent_once() -> None:
    shapes = {"a": (8, 8), "b": (4, 16), "c": (2, 8, 4), "d": (8, 4), "e": (1, 3)}
    halves: list[Holdings] = [
        {
            name: (shape, [Box((rank * half, *[0] * (len(shape) - 1)), (half, *shape[1:]))])
            for name, shape in shapes.items()
            if (half := shape[0] // 2)
        }
        | ({"e": (shapes["e"], [Box((0, 0), (1, 3))])} if rank == 1 else {})
        for rank in (0, 1)
    ]
    rounds = assign_owners([*halves, *halves])  # two copies
    matrices = {matrix.name: matrix for matrices in rounds for matrix in matrices}
    assert matrices.keys() == shapes.keys()
    for matrices_of_a_round in rounds:
        owners = [matrix.owner for matrix in matrices_of_a_round]
        assert len(owners) == len({*owners})
    # Work m^2 n, times the matrices of a stack: 512, 256, 256, 128 and 3; the last one's holders are ranks 1 and 3.
    assert [matrices[name].owner for name in "abcde"] == [0, 1, 2, 3, 3]
    for matrix in matrices.values():
        sent = [(rank, box) for rank, boxes in enumerate(matrix.sent) for box in boxes]
        assert sum(box.numel for _, box in sent) == math.prod(matrix.shape)
        assert all(rank == matrix.owner or box not in matrix.boxes[matrix.owner] for rank, box in sent)


def test_a_stack_of_matrices_is_orthogonalised_one_by_one() -> None:
    muon = registry.get("optimizer", "muon")
    stack = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    parameters = [torch.nn.Parameter(each.clone()) for each in (stack, *stack)]
    for p in parameters:
        p.grad = p.detach().sin()
    names = [["stack"], ["0", "1", "2"]]
    for group, given in zip(names, (parameters[:1], parameters[1:]), strict=True):
        optimizer = muon([{"params": given, "matrices": group, "weight_decay": 0.1}], 0.1, muon.Options())
        kinds = [("param", given), ("update", [p.grad for p in given])]
        optimizer.bind(
            lambda kinds=kinds, group=group: [
                Shard(kind, name, tuple(t.shape), whole_pieces(t, tuple(t.shape)))
                for kind, tensors in kinds
                for name, t in zip(group, tensors, strict=True)
            ],
            Group(),
            torch.device("cpu"),
        )
        optimizer.step()
    assert torch.equal(parameters[0], torch.stack(parameters[1:]))
