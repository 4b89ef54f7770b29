"""Text that a model makes of the run's prompts at every validation, without a trace in its training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import Workspace
from crosstrain.monitor import hardware
from fixtures_ranks import mostly_slow, train

PROMPTS = "run.sample_prompts=[ban der, kin]"
EVALUATED = ("run.max_iters=6", "run.eval_interval=2", "run.eval_iters=1", "run.sample_tokens=8")
RUNNERS = ["ddp@2", "ddp@1", "fsdp@2", "zero1@2", "zero3@2", "megatron_tp2@2", "megatron_pp2@2"]


@pytest.mark.parametrize("place", mostly_slow(RUNNERS, quick=["ddp@1"]))
def test_prompts_are_continued_at_every_validation_and_leave_no_trace(workspace: Workspace, place: str) -> None:
    runner, size = place.split("@")
    named = (f"run.runner={runner}", *EVALUATED)
    plain = train(workspace.project, "plain", *named, size=int(size))
    told = train(workspace.project, "told", *named, PROMPTS, size=int(size))
    for key in ("loss", "grad_norm", "lr"):  # dropout is on, so a random number more or less would show
        assert told.column(key) == plain.column(key)
    validated = [row for row in told.rows if "val_loss" in row]
    assert [row["val_loss"] for row in validated] == [row["val_loss"] for row in plain.rows if "val_loss" in row]
    assert [row["step"] for row in told.rows if "generated" in row] == [2, 4, 6]
    for row in validated:
        assert [sample["prompt"] for sample in row["generated"]] == ["ban der", "kin"]
        assert all(sample["text"] for sample in row["generated"])

    events = EventAccumulator(str(told.folder / "tensorboard"))
    events.Reload()
    shown = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("generated/1/text_summary")]
    texts = ["kin" + row["generated"][1]["text"] for row in validated]
    assert [[line[4:] for line in text.split("\n")] for text in shown] == [text.splitlines() for text in texts]
    last = (told.folder / "log.txt").read_text().split("sample of generated text:\n")
    assert len(last) == 3  # in the closing lines, where those of the last validation are shown
    assert last[2].startswith("    | " + texts[-1].splitlines()[0])


def test_the_same_weights_say_the_same(workspace: Workspace) -> None:
    named = (*EVALUATED, "run.log_interval=3", PROMPTS)
    first, again = (train(workspace.project, name, *named) for name in ("first", "again"))
    generated = [row["generated"] for row in first.rows if "generated" in row]
    assert len(generated) == 3
    assert generated == [row["generated"] for row in again.rows if "generated" in row]


def test_a_prompt_that_is_too_long_is_said_once_and_left_out(workspace: Workspace) -> None:
    run = train(workspace.project, "out", *EVALUATED, f"run.sample_prompts=[{'ban ' * 60}, kin]")
    log = (run.folder / "log.txt").read_text()
    assert log.count("run.sample_prompts: the prompt has") == 1
    assert [[s["prompt"] for s in row["generated"]] for row in run.rows if "generated" in row] == [["kin"]] * 3


def test_rows_tell_how_many_samples_the_loader_could_give(workspace: Workspace) -> None:
    run = train(workspace.project, "out", "run.max_iters=4", "run.log_interval=2")
    for row in run.rows:
        assert row["loader_samples_per_second"] > row["samples"] / row["step"] / (row["step_ms"] / 1000)
        assert "gpu_utilisation" not in row


def test_gpu_utilisation_is_told_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: Any) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported.")

    assert hardware.gpu_utilisation(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 87)
    assert hardware.gpu_utilisation(torch.device("cuda")) == 87.0
    monkeypatch.setattr(torch.cuda, "utilization", unknown)
    assert hardware.gpu_utilisation(torch.device("cuda")) is None
