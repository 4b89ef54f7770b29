"""For `crosstrain evaluate`: questions about images, those of a split and those that somebody types."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from crosstrain.config.load import Config
from crosstrain.data.splits import open_split, training_dataset
from crosstrain.data.vision.image_dataset import ImageDataset
from crosstrain.data.vision.prompts import VqaDataset, prompt_builder
from crosstrain.engine.runner import Runner
from crosstrain.inference.contact_sheet import contact_sheet
from crosstrain.inference.encoding import Encoders
from crosstrain.inference.generation import Sampling
from crosstrain.inference.vqa import Answer, answer_questions, score
from crosstrain.utils.logging import log

_BATCH = 64  # questions that are answered together
_ON_SHEET = 48


def answer_splits(
    config: Config, runner: Runner, tokenizer: Any, job: dict[str, Any], sampling: Sampling, is_main: bool
) -> dict[str, Any]:
    """Scores and predictions of each split that the job names; draws the sheet that it asks for. Collective."""
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
        contact_sheet(pictures, Path(job["sheet"]))
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
    """Some of the answers, spread over all, with the pictures that they are about; one answer for each picture."""
    about = {answer.sample: answer for answer in answers[:: max(1, len(answers) // max(1, most))]}
    found = []
    for sample, answer in about.items():
        picture = next((e.picture for e in dataset.examples(sample)), None)
        if picture is not None:
            found.append((answer, picture))
    return found[:most]
