"""Scores, predictions and a contact sheet of visual question answering, for `crosstrain evaluate --answers`."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from crosstrain.config.load import Config
from crosstrain.data.splits import open_split, training_dataset
from crosstrain.data.vision.image_dataset import ImageDataset, VqaDataset, prompt_builder
from crosstrain.engine.runner import Runner
from crosstrain.inference.encoding import Encoders
from crosstrain.inference.generation import Sampling
from crosstrain.inference.vqa import Answer, answer_questions, score
from crosstrain.utils.logging import log
from crosstrain.utils.optional_deps import require

_BATCH = 64  # questions that are answered together
_ON_SHEET = 48  # images
_SIDE, _COLUMNS = 144, 6  # pixels of an image, images in a row
_LINES, _WIDTH, _HEIGHT = 2, 24, 13  # lines of each text, letters in a line, pixels of a line
TILE = (_SIDE + 8, _SIDE + 3 * _LINES * _HEIGHT + 8)  # pixels of an image with its texts


def answer_splits(
    config: Config, runner: Runner, tokenizer: Any, job: dict[str, Any], sampling: Sampling, is_main: bool
) -> dict[str, Any]:
    """Scores and predictions of each split in `job["answers"]`; draws the contact sheet `job["sheet"]`. Collective."""
    component = training_dataset(config)
    results: dict[str, Any] = {}
    pictures: list[tuple[Answer, Any]] = []
    for split in job["answers"]:
        dataset = open_split(config, split)
        assert dataset.tokenizer_path is not None
        end = prompt_builder(component, dataset.tokenizer_path).end_id
        assert isinstance(dataset, VqaDataset)
        encoders = None
        if isinstance(dataset, ImageDataset):  # a plugin's own kind encodes by itself
            encoders = Encoders(dataset.tokenizer_path)
            dataset.encoder.encode_text = partial(encoders.encode, "words")
        answers, silent = answer_questions(
            runner, tokenizer, end, dataset, job["max_samples"], sampling.max_new_tokens, _BATCH
        )  # fmt: skip
        if encoders is not None:
            encoders.close()
        scores = score(answers)
        _say(split, scores, silent)
        results[split] = {
            "scores": scores, "samples_without_questions": silent, "predictions": [a.document() for a in answers],
        }  # fmt: skip
        if job["sheet"] and is_main:
            pictures += _pictures(dataset, answers, _ON_SHEET // len(job["answers"]))
    if job["sheet"] and is_main:
        contact_sheet(pictures, job["sheet"])
        log.info("pictures with answers are in %s", job["sheet"])
    return results


def _say(split: str, scores: dict[str, dict[str, float]], silent: int) -> None:
    for kind, numbers in scores.items():
        rest = "".join(
            f" | {key} {numbers[key]:.3f}, without {numbers[f'{key}_blind']:.3f}"
            for key in ("bleu4", "cider") if key in numbers
        )  # fmt: skip
        log.info(
            "%s | %-10s right %.3f | without the image %.3f (%d questions)%s",
            split, kind, numbers["right"], numbers["right_blind"], numbers["questions"], rest,
        )  # fmt: skip
    if scores:
        means = [sum(s[key] for s in scores.values()) / len(scores) for key in ("right", "right_blind")]
        log.info("%s | mean       right %.3f | without the image %.3f", split, *means)
    if silent:
        log.warning("%s | nothing was asked about %d samples", split, silent)


def _pictures(dataset: VqaDataset, answers: list[Answer], most: int) -> list[tuple[Answer, Any]]:
    """Some answers from all of the split, one for each image, with their images."""
    about = {answer.sample: answer for answer in answers[:: max(1, len(answers) // max(1, most))]}
    found = []
    for sample, answer in about.items():
        picture = next((e.picture for e in dataset.examples(sample)), None)
        if picture is not None:
            found.append((answer, picture))
    return found[:most]


def contact_sheet(shown: list[tuple[Answer, Any]], path: Path) -> None:
    """Draw answers with their PIL images: a right answer is green, a wrong one red, the truth below it grey.

    Long texts are cut; the predictions in JSON are whole.
    """
    image, draw_module = require("PIL.Image", "--sheet"), require("PIL.ImageDraw", "--sheet")
    rows = max(1, -(-len(shown) // _COLUMNS))
    sheet = image.new("RGB", (_COLUMNS * TILE[0], rows * TILE[1]), "white")
    draw = draw_module.Draw(sheet)
    for i, (answer, picture) in enumerate(shown):
        x, y = i % _COLUMNS * TILE[0] + 4, i // _COLUMNS * TILE[1]
        sheet.paste(picture.resize((_SIDE, _SIDE), image.NEAREST), (x, y + 2))
        y += _SIDE + 4
        question = answer.question.replace("<image>", "").strip()
        text = (answer.text or "(nothing)", "darkgreen" if answer.right else "red")
        for words, colour in ((question, "black"), text, (answer.truth, "grey")):
            for line in textwrap.wrap(words, _WIDTH, max_lines=_LINES, placeholder=" ..."):
                draw.text((x, y), line, fill=colour)
                y += _HEIGHT
    sheet.save(path)
