"""What a model answers to questions whose answers are known, how often it is right, and what it would guess blind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crosstrain.data.dataset import Batch, Dataset, Example
from crosstrain.extras import require
from crosstrain.runner import Runner

_LONG = 4  # words: longer answers are judged as captions too
_SIDE, _TEXT, _COLUMNS = 144, 46, 6  # pixels of a picture and of the text below it, pictures to a row, of a sheet


@dataclass(frozen=True)
class Answer:
    """What was answered to a question."""

    example: Example
    text: str
    blind: str  # with the images' pixels zero

    @property
    def right(self) -> bool:
        return _same(self.text, self.example.answer)

    @property
    def right_blind(self) -> bool:
        return _same(self.blind, self.example.answer)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        e = self.example
        said = {"answer": self.text, "truth": e.answer, "right": self.right, "blind": self.blind}
        return {"kind": e.kind, "question": e.question, **said}


def _same(a: str, b: str) -> bool:
    return a.lower().split() == b.lower().split()


def answer_questions(
    runner: Runner, tokenizer: Any, end: int, dataset: Dataset, max_samples: int | None, max_new_tokens: int, batch: int
) -> list[Answer]:
    """Greedy answers to what a split's first samples ask, the same on every rank. Collective."""
    answers = []
    with runner.evaluating():
        for examples in _batches(dataset, max_samples, batch):
            seen = _greedy(runner, tokenizer, end, examples, max_new_tokens, blind=False)
            blind = _greedy(runner, tokenizer, end, examples, max_new_tokens, blind=True)
            answers += [Answer(*row) for row in zip(examples, seen, blind, strict=True)]
    return answers


def _batches(dataset: Dataset, max_samples: int | None, size: int) -> Iterator[list[Example]]:
    total = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    waiting: list[Example] = []
    for index in range(total):
        waiting += dataset.examples(index)
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
    if waiting:
        yield waiting


def _greedy(
    runner: Runner, tokenizer: Any, end: int, examples: list[Example], max_new_tokens: int, blind: bool
) -> list[str]:
    """The likeliest next tokens, one after another; prompts of different lengths are filled up on the left."""
    prompts = [torch.from_numpy(e.prompt["input_ids"]) for e in examples]
    longest = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0)) for p in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - len(p) for p in prompts]).long()
    pixels = [e.prompt["pixel_values"] for e in examples if "pixel_values" in e.prompt]
    more: Batch = {"pixel_values": torch.from_numpy(np.concatenate(pixels))} if pixels else {}
    if blind:
        more = {key: torch.zeros_like(value) for key, value in more.items()}
    cache = runner.model.new_cache()
    said = torch.full((len(examples), max_new_tokens), end)
    new, positions = ids, (mask.cumsum(1) - 1).clamp(min=0)
    for step in range(max_new_tokens):
        batch = {"input_ids": new, "attention_mask": mask, "position_ids": positions, "cache": cache, **more}
        token = runner.evaluate(batch).argmax(-1).cpu()
        done = (said[:, :step] == end).any(1)
        said[:, step] = token.masked_fill(done, end)
        if (said[:, : step + 1] == end).any(1).all():
            break
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        if cache is None:
            new, positions = torch.cat([new, token[:, None]], 1), (mask.cumsum(1) - 1).clamp(min=0)
        else:
            new, positions, more = token[:, None], positions[:, -1:] + 1, {}
    rows = [row[: row.index(end)] if end in row else row for row in said.tolist()]
    return [tokenizer.decode(row, skip_special_tokens=False).strip() for row in rows]


def score(answers: list[Answer]) -> dict[str, dict[str, float]]:
    """By kind of question: how many, the share answered exactly right, the share that is right without images.

    Kinds whose answers are long also have BLEU-4 and CIDEr (Vedantam et al., 2015) by pycocoevalcap.
    """
    kinds: dict[str, list[Answer]] = {}
    for answer in answers:
        kinds.setdefault(answer.example.kind, []).append(answer)
    scores = {}
    for kind, group in sorted(kinds.items()):
        scores[kind] = {
            "questions": float(len(group)),
            "right": sum(a.right for a in group) / len(group),
            "right_blind": sum(a.right_blind for a in group) / len(group),
        }
        if sum(len(a.example.answer.split()) for a in group) / len(group) > _LONG:
            scores[kind] |= _caption_scores(group)
    return scores


def _caption_scores(group: list[Answer]) -> dict[str, float]:
    bleu = require("pycocoevalcap.bleu.bleu", "BLEU")
    cider = require("pycocoevalcap.cider.cider", "CIDEr")
    truth = {i: [a.example.answer.lower()] for i, a in enumerate(group)}
    said = {i: [a.text.lower()] for i, a in enumerate(group)}
    scores = {"cider": float(cider.Cider().compute_score(truth, said)[0])}
    return scores | {"bleu4": float(bleu.Bleu(4).compute_score(truth, said, verbose=0)[0][3])}


def contact_sheet(answers: list[Answer], path: Path) -> None:
    """A picture of one answer for each image: the image, what was asked, what was answered, what is true."""
    image, draw_module = require("PIL.Image", "--sheet"), require("PIL.ImageDraw", "--sheet")
    shown = [a for a in answers if a.example.picture is not None]
    rows = -(-len(shown) // _COLUMNS)
    sheet = image.new("RGB", (_COLUMNS * (_SIDE + 8), max(rows, 1) * (_SIDE + _TEXT)), "white")
    draw = draw_module.Draw(sheet)
    for i, a in enumerate(shown):
        x, y = i % _COLUMNS * (_SIDE + 8) + 4, i // _COLUMNS * (_SIDE + _TEXT)
        sheet.paste(a.example.picture.resize((_SIDE, _SIDE), image.NEAREST), (x, y + 2))
        question = a.example.question.replace("<image>", "").strip()
        lines = [question[:26], question[26:52], f"{a.text} ({a.example.answer})"[:26]]
        for n, line in enumerate(lines):
            colour = "black" if n < 2 else "darkgreen" if a.right else "red"
            draw.text((x, y + _SIDE + 4 + 13 * n), line, fill=colour)
    sheet.save(path)
