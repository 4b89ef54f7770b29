"""The ladders: their data is right and held out, and the first one ends with the same bits under two runners."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT, copy_source

LADDER = ROOT / "projects" / "ladder"
SMALL = [
    "run.max_iters=2", "run.eval_iters=1", "run.warmup_fraction=null", "run.warmup_steps=1", "run.global_batch_size=8",
    "run.micro_batch_size=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ladder") / "data"
    subprocess.run([sys.executable, LADDER / "write_data.py", "--output", folder], check=True)
    return folder


def exchanges(path: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    return [(question["content"], answer["content"]) for question, answer in rows]


def test_sums_are_right_and_held_out(data: Path) -> None:
    parts = [exchanges(data / name) for name in ("skills.jsonl", "sums.jsonl", "sums_held_out.jsonl")]
    found = [{question: answer for question, answer in part if "+" in question} for part in parts]
    assert [len(part) for part in found] == [400, 400, 200]
    assert len({question for part in found for question in part}) == 1000
    for question, answer in (pair for part in found for pair in part.items()):
        assert sum(map(int, re.findall(r"\d+", question))) == int(answer)


def test_other_skills_are_right(data: Path) -> None:
    closing = {"(": ")", "[": "]", "{": "}"}
    for question, answer in exchanges(data / "skills.jsonl"):
        asked, _, rest = question.partition(": ")
        match asked:
            case "Repeat":
                assert answer == rest
            case "What is the last letter of":
                assert answer == rest.rstrip("?")[-1]
            case "Close the brackets":
                opened = rest.split()
                while opened:
                    assert closing[opened.pop()] == answer.split()[len(rest.split()) - len(opened) - 1]
            case _:
                assert "+" in question or answer.endswith("day")


def test_a_record_has_what_its_sentence_says_and_held_out_names_are_new(data: Path) -> None:
    names = []
    for part in ("records.jsonl", "records_held_out.jsonl"):
        rows = [(question, json.loads(answer)) for question, answer in exchanges(data / part)]
        assert all(str(value) in question for question, record in rows for value in record.values())
        names.append({record[key] for _, record in rows for key in ("who", "what")})
    assert not names[0] & names[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_ladder_ends_with_the_same_bits_under_two_runners(tmp_path: Path) -> None:
    folder = copy_source(tmp_path / "project")
    ended = []
    for runner in ("ddp", "fsdp"):
        output = folder / "output" / runner
        words = ["projects/ladder/climb.py", "--runner", runner, "--output", str(output), "--options", *SMALL]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(folder / "platform")}
        subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True, timeout=900)
        ended.append(re.findall(r"`(\w{16})`", (output / "result.md").read_text()))
    assert len(ended[0]) == 3
    assert ended[0] == ended[1]
