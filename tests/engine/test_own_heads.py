"""Models whose logits are more than a matrix product train as a loop of transformers' own forward does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import Workspace
from fixtures_families import tiny
from fixtures_ranks import make_trainer, mostly_slow, run_ranks
from fixtures_training import Followed, follow, project, relative

OPTIONS = (
    "run.max_iters=4", "run.micro_batch_size=1", "run.global_batch_size=4", "run.grad_norm_clip=0",
    "run.optimizer={name: sgd, momentum: 0}", "run.weight_decay=0", "run.init_lr=0.05", "run.min_lr=0.05",
    "run.warmup_steps=0",
)  # fmt: skip
LAYOUTS = ["ddp@1", "ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron@2"]
FAMILIES = ["roberta", "prophetnet", "modernbert-decoder"]


def config_of(family: str) -> dict[str, Any]:
    dropout = {key: 0.0 for key in vars(AutoConfig.for_model(family)) if "dropout" in key}
    return tiny(family) | {"vocab_size": 320, "max_position_embeddings": 66} | dropout


def bare_loop(file: str, options: tuple[str, ...]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and the first step's gradients of transformers' model in a plain loop, from the same weights and data."""
    trainer = make_trainer(file, options)
    model = trainer.runner.model
    given = dict(model.options.config)
    made = AutoConfig.for_model(given.pop("model_type"), **given)
    theirs = AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32).train()
    own = model.weights.parameters()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(own[name][: len(parameter)])
    losses, first = [], {}
    batches = trainer.batches()
    for _ in range(4):
        loss = torch.zeros(())
        step = next(batches)
        for micro in step:
            logits = theirs(input_ids=micro.data["input_ids"], use_cache=False).logits
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro.data["labels"].flatten())
        loss = loss / len(step)
        theirs.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
        first = first or {name: g.numpy().copy() for name, g in gradients.items()}
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                if name in gradients:
                    p -= 0.05 * gradients[name]
    trainer.runner.close()
    return losses, first


@pytest.fixture(scope="module", params=mostly_slow(FAMILIES, ["roberta"]))
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    config = config_of(request.param)
    workspace = project(Workspace(tmp_path_factory.mktemp("head"), dataset), {"arch": "causal_lm", "config": config})
    options = (*OPTIONS, f"run.output_dir={workspace.path}/bare")
    return workspace, *run_ranks(1, bare_loop, str(workspace.project), options)[0]


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, ["ddp@1"]))
def test_a_head_of_its_own_kind_trains_as_a_bare_loop(bare: Any, layout: str) -> None:
    workspace, losses, gradients = bare
    unused = ("run.runner.find_unused_parameters=true",) if layout == "ddp@2" else ()
    ours: Followed = follow(workspace, layout, *OPTIONS, *unused)
    assert relative(ours.column("loss"), losses) < 1e-6
    norm = np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
    for name, gradient in gradients.items():
        assert np.linalg.norm(ours.gradients[name] - gradient) < 1e-6 * norm, name
