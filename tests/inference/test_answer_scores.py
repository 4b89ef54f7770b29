"""Scores of answers: VQA accuracy and yes-or-no scores, computed by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from crosstrain_plugins.builtin.evaluations.answers.scores import score, vqa_accuracy, yes_scores


@dataclass
class Given:
    kind: str
    truth: str
    text: str
    text_only: str = ""
    truths: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("answer", "truths", "accuracy"),
    [
        ("yes", ["yes"] * 2 + ["no"] * 8, (2 * 1 / 3 + 8 * 2 / 3) / 10),  # two annotators miss one of the two others
        ("no", ["yes"] * 2 + ["no"] * 8, 1.0),
        ("yes", ["yes"] * 3 + ["no"] * 7, (3 * 2 / 3 + 7 * 1) / 10),
        ("maybe", ["yes"] * 10, 0.0),
        ("The two cats.", ["2 cats"] * 10, 1.0),  # articles, punctuation and number words
        ("1,000", ["1000"] * 10, 1.0),
        ("red", ["red"], 1.0),
    ],
)
def test_vqa_accuracy(answer: str, truths: list[str], accuracy: float) -> None:
    assert vqa_accuracy(answer, truths) == pytest.approx(accuracy)


def test_yes_or_no() -> None:
    found = yes_scores(["Yes, it is", "no", "yes", "no"], ["yes", "yes", "no", "no"])
    assert found == pytest.approx({"precision": 0.5, "recall": 0.5, "f1": 0.5, "yes_share": 0.5})
    assert yes_scores(["no"], ["yes"])["f1"] == 0


def test_kinds_get_the_scores_that_fit_them() -> None:
    answers = [
        Given("is there", "yes", "yes"), Given("is there", "no", "yes"), Given("colour", "red", "red", "blue"),
        Given("many", "2", "two", "3", ("2",) * 9 + ("3",)),
    ]  # fmt: skip
    scores = score(answers)
    assert scores["is there"]["recall"] == 1
    assert scores["is there"]["precision"] == 0.5
    assert scores["colour"] == {"questions": 1, "right": 1, "right_blind": 0}
    assert scores["many"]["vqa_accuracy"] == 1
    assert scores["many"]["right"] == 0
    assert scores["many"]["vqa_accuracy_blind"] == pytest.approx(9 / 10 * 1 / 3)
