"""Objectives on pairs: the papers' losses and gradients, alike under every runner, and a preference that is learned."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

import crosstrain
from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.data.dataset import Dataset
from crosstrain.data.splits import open_split
from crosstrain.engine.build import build_model, make_objective, model_on_meta
from crosstrain.engine.checks import check_fit
from crosstrain.engine.runner import Runner
from crosstrain.inference.policy import Policy
from crosstrain.training.reference import add_reference
from crosstrain.utils import storage
from crosstrain.utils.errors import ConfigError, DataError, EmptySplit
from crosstrain.utils.types import IGNORE_INDEX, Batch, MicroBatch, Step
from fixtures_chat import SHAPES, conversation, write_tokenizer
from fixtures_ranks import mostly_slow, train
from fixtures_training import Followed, assert_equal_training, follow

# A margin is a difference of sums of log-probabilities, so its rounding is larger than a mean's.
TOLERANCE = 5e-6
# AdamW amplifies rounding: the largest difference, 5.4e-6, is DPO's under tensor parallelism in the fifth step, after
# equal first losses.
TOLERANCE_OF_RUNNERS = 1e-5
RNG = np.random.default_rng(0)
OBJECTIVES = ("dpo", "orpo", "kto", "reward_model", "info_nce")
PAIRS = 40


def rows() -> list[dict[str, Any]]:
    rng, found = random.Random(0), []
    for _ in range(PAIRS):
        *prompt, chosen = conversation(rng, SHAPES["chatml"], turns=rng.randint(1, 2))
        other = conversation(rng, SHAPES["chatml"], turns=1)[-1]
        found.append({"prompt": prompt, "chosen": [chosen], "rejected": [other]})
    return found


def project(workspace: Workspace, objective: str, data: list[dict[str, Any]] | None = None) -> Workspace:
    tokenizer = write_tokenizer(workspace.path / "tokenizer", SHAPES["chatml"].template)
    path = workspace.path / "preferences.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data or rows()))
    workspace.config["datasets"] = {
        "answers": {
            "name": "preference", "path": str(path), "tokenizer": str(tokenizer), "seq_length": 256,
            "pairs": objective != "kto",
        }
    }  # fmt: skip
    workspace.config["model"] |= {"vocab_size": 512, "n_positions": 256, "dropout": 0.0}
    options = {} if objective in ("reward_model", "info_nce") else {"beta": 0.3}
    workspace.config["run"] |= {"objective": {"name": objective, **options}}
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return workspace


def built(workspace: Workspace, *options: str) -> tuple[Runner, Dataset]:
    config = load_config(workspace.project, options)
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, None, for_training=True)
    registry.get("dataset", "preference").prepare(config.datasets["answers"].options)
    return runner, open_split(config, "train")


# ---- the papers, once more, from logits


def sequence(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sums of the targets' log-probabilities, and their numbers, of each row."""
    logits = model.lm(input_ids=batch["input_ids"]).logits.double()[..., :512]
    known = batch["labels"] != IGNORE_INDEX
    picked = log_softmax(logits, -1).gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    return torch.where(known, picked, 0.0).sum(1), known.sum(1)


def by_the_paper(name: str, model: Any, batch: Batch, beta: float) -> Tensor:
    last = torch.stack([torch.nonzero(row != IGNORE_INDEX).max() for row in batch["labels"]])
    if name == "reward_model":
        logits = model.lm(input_ids=batch["input_ids"]).logits.double()
        scores = torch.stack([logits[row, place, 0] for row, place in enumerate(last)])
        return -torch.log(torch.sigmoid(scores[0::2] - scores[1::2])).sum()
    if name == "info_nce":
        states = model.lm.transformer(input_ids=batch["input_ids"]).last_hidden_state.double()
        vectors = [states[row, place] / states[row, place].norm() for row, place in enumerate(last)]
        total = torch.zeros((), dtype=torch.float64)
        for i in range(0, len(vectors), 2):
            for mine, others in ((vectors[i], vectors[1::2]), (vectors[i + 1], vectors[0::2])):
                chances = torch.stack([(mine @ other / 0.05).exp() for other in others])
                total = total - torch.log(chances[i // 2] / chances.sum()) / 2
        return total
    sums, lengths = sequence(model, batch)
    first, second = sums[0::2], sums[1::2]
    if name == "orpo":
        chosen, rejected = first / lengths[0::2], second / lengths[1::2]
        odds = (torch.exp(chosen) / (1 - torch.exp(chosen))) / (torch.exp(rejected) / (1 - torch.exp(rejected)))
        return (-chosen - beta * logsigmoid(torch.log(odds))).sum()
    reference = batch["reference"].double()
    if name == "dpo":
        ratio = (first - reference[0::2]) - (second - reference[1::2])
        return -torch.log(torch.sigmoid(beta * ratio)).sum()
    z0 = (second - reference[1::2]).detach().mean().clamp(min=0)
    reward = first - reference[0::2]
    good = batch["preferred"][0::2] == 1
    value = torch.where(good, torch.sigmoid(beta * (reward - z0)), torch.sigmoid(beta * (z0 - reward)))
    return (1 - value).sum()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_the_papers(workspace: Workspace, name: str) -> None:
    runner, data = built(project(workspace, name))
    assert runner.objective.targets == ("answers" if name == "kto" else "pairs")  # not tokens, which have a perplexity
    # References far from the model's own, so that no sigmoid sits in its middle.
    data.reference = np.random.default_rng(1).normal(-120, 8, (len(data), 2)).astype(np.float32)
    model = runner.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    batch = data.collate([data.get(index, RNG) for index in range(5)])
    batch["reference"] = sequence(model, batch)[0].detach().float() + torch.linspace(-4, 4, 10)
    step = Step([MicroBatch(0, batch, 0, tuple(range(5)))])
    runner.objective.begin_step(step, Policy(runner, data))
    ours = model(**runner.objective.inputs(step[0].data))
    ours.backward()
    mine = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    theirs = by_the_paper(name, model, batch, 0.3)
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=TOLERANCE)
    for key, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        if scale > 1e-6:  # a key's bias has no gradient
            assert (mine[key] - parameter.grad).abs().max() < TOLERANCE * scale, key


@pytest.mark.usefixtures("home")
def test_micro_batches_add_negatives(workspace: Workspace) -> None:
    """Gradients of three micro batches of one pair each are those of a batch of three pairs."""
    runner, data = built(project(workspace, "info_nce"))
    gradients = []
    for sizes in ([3], [1, 1, 1]):
        step, first = Step(), 0
        for size in sizes:
            numbers = tuple(range(first, first + size))
            step.append(MicroBatch(first, data.collate([data.get(n, RNG) for n in numbers]), 0, numbers))
            first += size
        runner.objective.begin_step(step, Policy(runner, data))
        total = sum(runner.compute_loss(micro.data) for micro in step)
        total.backward()
        norm = torch.cat([p.grad.flatten() for p in runner.model.parameters() if p.grad is not None])
        gradients.append((total.item(), norm))
        runner.model.zero_grad()
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=TOLERANCE)
    assert (gradients[0][1] - gradients[1][1]).norm() < TOLERANCE * gradients[0][1].norm()


# ---- another library


def by_trl(name: str, policy: Any, reference: Any, rows: list[dict[str, Any]], home: Path, good: list[bool]) -> Tensor:
    """The mean loss of TRL's trainer for rows that are tokenized already, after its own forward passes."""
    trl = pytest.importorskip("trl")  # of the extra `bench`
    from datasets import Dataset as Table
    from transformers import AutoTokenizer

    kinds = {"dpo": (trl.DPOTrainer, trl.DPOConfig), "kto": (trl.KTOTrainer, trl.KTOConfig)}
    arguments = kinds[name][1](
        output_dir=str(home / "trl"),
        beta=0.3,
        bf16=False,
        use_cpu=True,
        report_to=[],
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
    )
    table = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "completion": "a", "label": True}]
    trainer = kinds[name][0](
        model=policy,
        ref_model=reference,
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(home / "tokenizer"),
        train_dataset=Table.from_list([table[name == "kto"]] * 4),
    )

    def inputs(chosen: list[dict[str, Any]], prefix: str = "") -> dict[str, Tensor]:
        longest = 1 + max(len(row["input_ids"]) for row in chosen)
        ids, attends, completes = (torch.zeros(len(chosen), longest, dtype=torch.long) for _ in range(3))
        for number, row in enumerate(chosen):
            length, labels = len(row["input_ids"]), torch.from_numpy(row["labels"])
            ids[number, :length] = torch.from_numpy(row["input_ids"])
            ids[number, length] = labels[-1].clamp(min=0)
            attends[number, : length + 1] = 1
            completes[number, 1 : length + 1] = labels != IGNORE_INDEX
        found = {"input_ids": ids, "attention_mask": attends, "completion_mask": completes}
        return {prefix + key: value for key, value in found.items()}

    if name == "dpo":
        given = inputs(rows[0::2] + rows[1::2])
    else:
        given = inputs(rows[0::2]) | inputs(rows[1::2], "KL_") | {"label": torch.tensor(good)}
    return trainer.compute_loss(trainer.model, given)


@pytest.mark.slow
@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_losses_and_gradients_are_those_of_trl(workspace: Workspace, name: str) -> None:
    runner, data = built(project(workspace, name))
    model: Any = runner.model
    reference = copy.deepcopy(model.lm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # away from the reference
    policy = copy.deepcopy(model.lm)
    data.reference = np.zeros((len(data), 2), np.float32)
    samples = [data.get(index, RNG) for index in range(6)]
    batch = data.collate(samples)
    model.lm, own = reference, model.lm
    batch["reference"] = sequence(model, batch)[0].detach().float()
    model.lm = own
    ours = model(**runner.objective.inputs(batch)) / 6
    ours.backward()
    rows = [row for sample in samples for row in sample["rows"]]
    theirs = by_trl(name, policy, reference, rows, workspace.path, (batch["preferred"][0::2] == 1).tolist())
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=TOLERANCE)
    for (key, mine), other in zip(model.lm.named_parameters(), policy.parameters(), strict=True):
        scale = other.grad.abs().max()
        if scale > 1e-6:  # a key's bias has no gradient
            assert (mine.grad - other.grad).abs().max() < 10 * TOLERANCE * scale, key  # TRL's softmax is fp32


# ---- runners


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Callable[[str], tuple[Workspace, Followed]]:
    @lru_cache
    def make(name: str) -> tuple[Workspace, Followed]:
        workspace = project(Workspace(tmp_path_factory.mktemp(name), dataset), name)
        return workspace, follow(workspace, "ddp@1", *OPTIONS)

    return make


OPTIONS = ("run.max_iters=6", "run.micro_batch_size=1", "run.global_batch_size=4", "run.init_lr=1e-3")
RUNNERS = ("ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron_tp2@2", "megatron_tp2_sp@2", "megatron_pp2@2")
CASES = [
    (name, runner) for name in OBJECTIVES for runner in RUNNERS if name != "info_nce" or "megatron" not in runner
]  # fmt: skip


@pytest.mark.parametrize("case", mostly_slow(CASES, []), ids="-".join)
def test_every_runner_prefers_alike(
    reference: Callable[[str], tuple[Workspace, Followed]], case: tuple[str, str]
) -> None:
    name, runner = case
    workspace, one = reference(name)
    other = follow(workspace, runner, *OPTIONS)
    assert_equal_training(one, other, TOLERANCE_OF_RUNNERS)
    for key in one.rows[-1]:
        if key.startswith("rewards/") and key != "rewards/accuracies":  # of which the first step's are ties
            assert other.column(key) == pytest.approx(one.column(key), rel=1e-3, abs=2e-5), key
    if name == "dpo":
        assert one.rows[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
        assert one.rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["megatron_tp2@2", "megatron_pp2@2"])
def test_embeddings_are_refused_where_ranks_cut_the_model(workspace: Workspace, runner: str) -> None:
    with pytest.raises(AssertionError, match="info_nce needs whole models on every rank"):
        follow(project(workspace, "info_nce"), runner, *OPTIONS)


@pytest.mark.slow
def test_a_reference_of_other_weights_or_data_is_not_taken(workspace: Workspace) -> None:
    project(workspace, "dpo")
    once = workspace.train("run", *OPTIONS, "run.max_iters=2", "run.save_interval=100")
    measured = (once.folder / "reference_train.bin").read_bytes()
    shutil.rmtree(once.folder / "checkpoints")  # as if it had been stopped before the first
    other = workspace.train("run", *OPTIONS, "run.max_iters=2", "run.seed=5")  # other initial weights
    assert (other.folder / "reference_train.bin").read_bytes() != measured
    assert other.rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    project(workspace, "dpo", rows()[:-1])
    refused = workspace.train("run", *OPTIONS, fails=True)
    assert refused.code == 1
    assert "reference_train.bin: damaged, or measured on different data" in refused.err


@pytest.mark.slow
def test_a_reference_is_read_from_the_bucket_of_an_earlier_run(workspace: Workspace, home: Path) -> None:
    runner, data = built(project(workspace, "dpo"))
    given = data, runner, 2, 0
    for name in ("first", "own"):
        (home / name).mkdir()
    add_reference(*given, home / "first", None)
    measured, file = data.reference, "reference_train.bin"
    storage.write(f"memory://bucket/run/{file}", (home / "first" / file).read_bytes())
    with torch.no_grad():
        runner.model.lm.lm_head.weight.mul_(2)
    add_reference(*given, home / "own", storage.local("memory://bucket/run") / "checkpoints" / "step_000001")
    assert np.array_equal(data.reference, measured)
    assert (home / "own" / file).read_bytes() == (home / "first" / file).read_bytes()


@pytest.mark.slow
def test_a_run_resumes_with_the_reference_that_it_began_with(workspace: Workspace) -> None:
    project(workspace, "dpo")
    whole = workspace.train("whole", *OPTIONS)
    workspace.train("parts", *OPTIONS, "run.max_iters=3", "run.lr_decay_iters=6")
    parts = workspace.train("parts", *OPTIONS, nproc=2)
    assert parts.column("loss") == pytest.approx(whole.column("loss"), rel=TOLERANCE)
    longer = (*OPTIONS, "run.max_iters=8", "run.lr_decay_iters=6")
    own = parts.folder / "reference_train.bin"
    own.write_bytes(own.read_bytes()[:-1] + b"?")
    damaged = workspace.train("parts", *longer, fails=True)
    assert "reference_train.bin: damaged, or measured on different data" in damaged.err
    own.unlink()
    lost = workspace.train("parts", *longer, fails=True)
    assert lost.code == damaged.code == 1
    assert "reference_train.bin: the reference that the run started with is missing" in lost.err


def win_rate(workspace: Workspace, checkpoint: Path | None) -> float:
    """Share of held-out pairs whose chosen answer is likelier than the rejected one."""
    config = load_config(workspace.project)
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, checkpoint, for_training=False)
    data = open_split(config, "val")
    with torch.no_grad():
        sums = sequence(runner.model, data.collate([data.get(index, RNG) for index in range(len(data))]))[0]
    return (sums[0::2] > sums[1::2]).double().mean().item()


def test_a_preference_is_learned(workspace: Workspace) -> None:
    rng = random.Random(1)
    pairs = [  # the longer answer is the less likely one at first
        {"prompt": f"say {rng.randint(0, 999)}", "chosen": "the cat sat on the mat", "rejected": "hello world"}
        for _ in range(96)
    ]
    project(workspace, "dpo", pairs)
    workspace.config["datasets"]["answers"]["split"] = [2, 1, 0]
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    run = train(workspace.project, "run", "run.max_iters=40", "run.global_batch_size=8", "run.init_lr=1e-2")
    assert win_rate(workspace, None) == 0.0
    assert win_rate(workspace, run.checkpoint(40)) == 1.0
    assert run.column("rewards/accuracies")[-1] == 1.0


# ---- layouts and mistakes


LAYOUTS = {
    "prompt": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "turns": {
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{"role": "assistant", "content": "good"}],
        "rejected": [{"role": "assistant", "content": "bad"}],
    },
    "whole conversations": {
        "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}],
        "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bad"}],
    },
    "whole conversations that begin with the prompt": {
        "prompt": "q",
        "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}],
        "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bad"}],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    },
}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(workspace: Workspace, layout: str) -> None:
    project(workspace, "dpo", [LAYOUTS[layout]])
    _, data = built(workspace)
    from crosstrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(data.tokenizer_path)
    rows = data.get(0, RNG)["rows"]
    said = [tokenizer.decode([int(t) for t in row["labels"] if t != IGNORE_INDEX]) for row in rows]
    assert said == ["good<|im_end|>", "bad<|im_end|>"]
    asked = [row["input_ids"][: int((row["labels"] != IGNORE_INDEX).argmax()) + 1].tolist() for row in rows]
    assert asked[0] == asked[1]
    assert tokenizer.decode(asked[0]).count("q") == 1


@pytest.mark.usefixtures("home")
def test_single_answers_and_their_mismatches(workspace: Workspace) -> None:
    data = [{"prompt": f"q{n}", "completion": f"a{n}", "label": n % 2 == 0} for n in range(4)]
    project(workspace, "kto", data)
    _, opened = built(workspace)
    batch = opened.collate([opened.get(index, RNG) for index in range(4)])
    assert batch["preferred"].tolist() == [1, 0, -1, 0, 1, 0, -1, 0]
    from crosstrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(opened.tokenizer_path)
    said = [tokenizer.decode([int(t) for t in row if t != IGNORE_INDEX]) for row in batch["labels"]]
    assert [words.removesuffix("<|im_end|>") for words in said] == ["a0", "a1", "a1", "a2", "a2", "a3", "a3", "a0"]
    pairs = [{"prompt": f"q{n}", "chosen": f"good{n}", "rejected": f"bad{n}"} for n in range(3)]
    project(workspace, "kto", pairs)
    _, opened = built(workspace)
    batch = opened.collate([opened.get(index, RNG) for index in range(6)])
    said = [tokenizer.decode([int(t) for t in row if t != IGNORE_INDEX]) for row in batch["labels"][1::2]]
    others = ["good1", "good1", "good2", "good2", "good0", "good0"]
    assert [words.removesuffix("<|im_end|>") for words in said] == others
    project(workspace, "dpo", data)
    with pytest.raises(DataError, match="set pairs: false to train with kto"):
        built(workspace)


@pytest.mark.usefixtures("home")
def test_an_objective_and_a_dataset_that_do_not_fit(workspace: Workspace) -> None:
    project(workspace, "dpo")
    _, data = built(workspace)
    for options in (["run.objective=kto"], ["run.objective=null"]):
        config = load_config(workspace.project, options)
        objective = make_objective(config, model_on_meta(config))
        with pytest.raises(ConfigError, match=r"run\.objective: the objective takes .*, but the dataset has pairs"):
            check_fit(objective, data)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", pytest.param("orpo", marks=pytest.mark.slow)])
def test_a_run_is_evaluated_with_its_objective(workspace: Workspace, objective: str) -> None:
    """On the numbers of training's own validation; another split has no reference."""
    project(workspace, objective)
    run = train(workspace.project, "run", *OPTIONS, "run.eval_interval=6", "datasets.answers.split=[4,1,0]")
    validated = [row["val_loss"] for row in run.rows if "val_loss" in row][-1]
    found = crosstrain.evaluate(run.folder, ["val"])["splits"]["val"]
    assert found["loss"] == pytest.approx(validated, rel=TOLERANCE)
    assert found["pairs"] == PAIRS / 5
    assert "rewards/margins" in found
    assert "perplexity" not in found
    with crosstrain.open(run.folder) as model:
        assert model.config.run.objective is None
    if objective == "dpo":
        (run.folder / "reference_train.bin").unlink()
        with pytest.raises(EmptySplit, match=r"run\.objective compares .*reference_train\.bin is missing"):
            crosstrain.evaluate(run.folder, ["train"])
