"""Scores of answers about images: exact match, VQA accuracy, yes and no, and captions."""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crosstrain import require

OTHERS = ("vqa_accuracy", "f1", "bleu4", "cider")  # scores besides `right` that the log shows
_LONG = 4  # words; kinds of question with longer reference answers on average are also scored as captions
_NUMBERS = {
    "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Answer:
    """An answer to a question about sample `sample` of a split.

    The image is not included, because ranks exchange answers.
    """

    sample: int
    kind: str
    question: str
    truth: str
    text: str
    text_only: str  # the answer with all pixels set to almost zero
    truths: tuple[str, ...] = ()  # all reference answers

    @property
    def right(self) -> bool:
        return same(self.text, self.truth)

    def document(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        return {
            "sample": self.sample,
            "kind": self.kind,
            "question": self.question,
            "answer": self.text,
            "truth": self.truth,
            "right": self.right,
            "blind": self.text_only,
        }


def same(a: str, b: str) -> bool:
    """Return True if two answers are equal, ignoring case and spaces."""
    return a.lower().split() == b.lower().split()


def score(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Return kind of question -> scores: number of questions, accuracy, and accuracy without the images.

    - Kinds with several reference answers have the accuracy of VQA (Antol et al., 2015).
    - Kinds of yes-or-no questions have precision, recall and F1 of the answer yes, and the share of that answer, as
      POPE reports them (Li et al., 2023).
    - Kinds with long answers have BLEU-4 (Papineni et al., 2002) and CIDEr-D (Vedantam et al., 2015), computed by
      pycocoevalcap, the code of the COCO caption challenge.

    The suffix `_blind` marks scores without images.
    """
    scores: dict[str, dict[str, float]] = {}
    for kind in sorted({answer.kind for answer in answers}):
        group = [answer for answer in answers if answer.kind == kind]
        truths = [answer.truth for answer in group]
        long = sum(len(truth.split()) for truth in truths) / len(group) > _LONG
        scores[kind] = {"questions": float(len(group))}
        for ending, texts in (("", [a.text for a in group]), ("_blind", [a.text_only for a in group])):
            found = {"right": sum(map(same, texts, truths)) / len(group)}
            if any(len(answer.truths) > 1 for answer in group):
                references = (answer.truths or (answer.truth,) for answer in group)
                found["vqa_accuracy"] = sum(map(vqa_accuracy, texts, references)) / len(group)
            if {truth.lower().strip() for truth in truths} == {"yes", "no"}:
                found |= yes_scores(texts, truths)
            found |= caption_scores(texts, truths) if long else {}
            scores[kind] |= {f"{name}{ending}": value for name, value in found.items()}
    return scores


def vqa_accuracy(answer: str, truths: Sequence[str]) -> float:
    """Return the accuracy of the VQA challenge (Antol et al., 2015, section 4).

    An answer that n of the other annotators gave counts min(n / 3, 1); this is averaged over all ways to leave out one
    annotator. Articles and punctuation are ignored, and number words are written as digits.
    """
    said, references = _plain(answer), [_plain(truth) for truth in truths]
    equal = references.count(said)
    if len(references) == 1:
        return float(equal)
    return sum(min((equal - (reference == said)) / 3, 1.0) for reference in references) / len(references)


def _plain(text: str) -> list[str]:
    words = re.sub(r"(?<=\d),(?=\d)", "", text.lower()).translate(_PUNCTUATION).split()
    return [_NUMBERS.get(word, word) for word in words if word not in _ARTICLES]


def yes_scores(answers: Sequence[str], truths: Sequence[str]) -> dict[str, float]:
    """Return precision, recall and F1 of the answer yes, and the share of answers that begin with yes."""
    yes = [answer.lower().lstrip().startswith("yes") for answer in answers]
    true = [truth.lower().strip() == "yes" for truth in truths]
    hits = sum(a and b for a, b in zip(yes, true, strict=True))
    precision, recall = hits / max(1, sum(yes)), hits / max(1, sum(true))
    f1 = 2 * precision * recall / max(1e-12, precision + recall)
    return {"precision": precision, "recall": recall, "f1": f1, "yes_share": sum(yes) / len(yes)}


def caption_scores(captions: list[str], truths: list[str]) -> dict[str, float]:
    """Compute CIDEr-D and BLEU-4 of captions, each against one reference caption; words are separated by spaces."""
    bleu = require("pycocoevalcap.bleu.bleu", "BLEU")
    cider = require("pycocoevalcap.cider.cider", "CIDEr")
    true, found = ({i: [" ".join(t.lower().split())] for i, t in enumerate(texts)} for texts in (truths, captions))
    return {
        "cider": float(cider.Cider().compute_score(true, found)[0]),
        "bleu4": float(bleu.Bleu(4).compute_score(true, found, verbose=0)[0][3]),
    }
