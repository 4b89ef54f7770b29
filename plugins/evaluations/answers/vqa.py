"""Visual question answering: answer questions with and without the image, score the answers, draw a contact sheet."""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain import (
    Example,
    OpenModel,
    Runner,
    Sample,
    Sampling,
    Split,
    UserError,
    VqaDataset,
    as_prompt,
    log,
    registry,
    require,
)
from crosstrain.data.splits import open_split, training_dataset
from crosstrain.inference.detokenizer import TextStream
from crosstrain.inference.generation import Sequence, decode

from .scores import OTHERS, Answer, score

_HIDDEN = 1e-6  # value of all pixels of a hidden image; some models of transformers leave out images of zeros
_BATCH = 64  # questions per batch
_BLOCK = 32  # samples per block; one rank answers a block, so the batches do not depend on the number of ranks
_ON_SHEET = 48  # maximum number of images on a contact sheet
_SIDE, _COLUMNS = 144, 6  # side of an image in pixels, images per row
_LINES, _WIDTH, _HEIGHT = 2, 24, 13  # lines per text, characters per line, pixels per line
TILE = (_SIDE + 8, _SIDE + 3 * _LINES * _HEIGHT + 8)  # width and height in pixels of an image with its three texts


def answer_questions(
    runner: Runner,
    tokenizer: Any,
    end: int,
    dataset: VqaDataset,
    max_samples: int | None,
    max_new_tokens: int,
    batch: int,
) -> tuple[list[Answer], int]:
    """Answer questions about a split's first samples greedily, and count samples without questions. Collective.

    The ranks share the work, and all ranks return all answers. The answers do not depend on the number of ranks. Raises
    UserError if a question leaves no room for `max_new_tokens`.
    """
    total = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    mine = list[Answer]()

    def batches() -> Iterator[list[tuple[int, Example]]]:
        for first in range(runner.dp.rank * _BLOCK, total, runner.dp.size * _BLOCK):
            indices = range(first, min(first + _BLOCK, total))
            block = [(index, example) for index in indices for example in dataset.examples(index)]
            for start in range(0, len(block), batch):
                yield block[start : start + batch]

    work = batches()
    with runner.evaluating():
        while True:
            questions = next(work, [])
            if not runner.dp.all_reduce_sum(len(questions), tag="questions")[0]:
                break
            # The forward may be collective, so a rank without questions runs it on a dummy prompt.
            prompts = [example.prompt for _, example in questions] or [as_prompt([], end)]
            answers, guesses = (
                _greedy(runner, tokenizer, end, prompts, max_new_tokens, text_only) for text_only in (False, True)
            )
            mine += [
                Answer(sample, e.kind, e.question, e.answer, *texts, e.answers)
                for (sample, e), *texts in zip(questions, answers, guesses, strict=False)
            ]
    everyone = [answer for part in runner.dp.all_gather(mine) for answer in part]
    # The sort is stable, so the order within a sample is kept.
    return sorted(everyone, key=lambda answer: answer.sample), total - len({answer.sample for answer in everyone})


def _greedy(
    runner: Runner, tokenizer: Any, end: int, prompts: list[Sample], max_new_tokens: int, text_only: bool
) -> list[str]:
    """Answer prompts greedily. `text_only`: hide the images. Collective."""
    longest, limit = max(len(prompt["input_ids"]) for prompt in prompts), runner.model.max_length
    if limit is not None and longest + max_new_tokens > limit:
        raise UserError(
            f"--answers: a question has {longest} tokens and the model takes at most {limit}, so there is no room for "
            f"{max_new_tokens} more; lower --max-new-tokens"
        )
    if text_only:
        prompts = [p | {key: np.full_like(p[key], _HIDDEN) for key in p if key == "pixel_values"} for p in prompts]
    sampling = Sampling(max_new_tokens, temperature=0)
    sequences = [Sequence(sampling, i, [end], TextStream(tokenizer)) for i in range(len(prompts))]
    return [text.strip() for text in decode(runner, prompts, sequences, group=runner.dp)]


def answer_splits(model: OpenModel, splits: list[Split], given: Mapping[str, Any]) -> dict[str, Any]:
    """Score and list the answers for the splits, and draw a contact sheet for --sheet. Collective."""
    component = training_dataset(model.config)
    kind = registry.get("dataset", component.name)
    results: dict[str, Any] = {}
    pictures: list[tuple[Answer, Any]] = []
    for split in splits:
        dataset = open_split(model.config, split)
        assert dataset.tokenizer_path is not None
        end = kind.prompt_builder(component.options, dataset.tokenizer_path).end_id
        assert isinstance(dataset, VqaDataset)
        answers, silent = answer_questions(
            model.runner, model.tokenizer, end, dataset, given["max_samples"], given["max_new_tokens"], _BATCH
        )
        scores = score(answers)
        _say(split, scores, silent)
        results[split] = {
            "scores": scores, "samples_without_questions": silent, "predictions": [a.document() for a in answers],
        }  # fmt: skip
        if given["sheet"] and model.is_main:
            pictures += _pictures(dataset, answers, _ON_SHEET // len(splits))
    if given["sheet"] and model.is_main:
        answer_sheet(pictures, given["sheet"])
        log.info("the images with their answers are in %s", given["sheet"])
    return results


def _say(split: str, scores: dict[str, dict[str, float]], silent: int) -> None:
    for kind, numbers in scores.items():
        rest = "".join(
            f" | {key} {numbers[key]:.3f}, without {numbers[f'{key}_blind']:.3f}" for key in OTHERS if key in numbers
        )
        log.info(
            "%s | %-10s right %.3f | without the image %.3f (%d questions)%s",
            split,
            kind,
            numbers["right"],
            numbers["right_blind"],
            numbers["questions"],
            rest,
        )
    if scores:
        means = [sum(s[key] for s in scores.values()) / len(scores) for key in ("right", "right_blind")]
        log.info("%s | mean       right %.3f | without the image %.3f", split, *means)
    if silent:
        log.warning("%s | %d samples have no questions", split, silent)


def _pictures(dataset: VqaDataset, answers: list[Answer], most: int) -> list[tuple[Answer, Any]]:
    """Select at most `most` answers with their images: one per image, spread over the split."""
    about = {answer.sample: answer for answer in answers[:: max(1, len(answers) // max(1, most))]}
    pictures = {sample: next((e.picture for e in dataset.examples(sample)), None) for sample in about}
    return [(about[sample], picture) for sample, picture in pictures.items() if picture is not None][:most]


def answer_sheet(shown: list[tuple[Answer, Any]], path: Path) -> None:
    """Draw PIL images in rows, each with the question, the answer (green: right, red: wrong) and the truth in grey.

    Long texts are truncated here, but not in the JSON predictions.
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
