"""For `crosstrain evaluate`: questions about images, those of a split and those that somebody types."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstrain.config.load import Config
from crosstrain.config.registry import registry
from crosstrain.data.dataset import Dataset, Questioner, Sample
from crosstrain.data.vision.conversations import IMAGE, Message
from crosstrain.engine.build import open_split, training_dataset
from crosstrain.engine.runner import Runner
from crosstrain.inference.contact_sheet import contact_sheet
from crosstrain.inference.generation import Sampling
from crosstrain.inference.vqa import Answer, answer_questions, score
from crosstrain.monitor.progress import log
from crosstrain.utils.errors import ConfigError, UserError, first_line
from crosstrain.utils.files import open_regular
from crosstrain.utils.optional_deps import require
from crosstrain.utils.trust import limited_to

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
        end = registry.get_dataset_class(component.name).questioner(component.options, dataset.tokenizer_path).end_id
        answers, silent = answer_questions(
            runner, tokenizer, end, dataset, job["max_samples"], sampling.max_new_tokens, _BATCH
        )  # fmt: skip
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


def _pictures(dataset: Dataset, answers: list[Answer], most: int) -> list[tuple[Answer, Any]]:
    """Some of the answers, spread over all, with the pictures that they are about; one answer for each picture."""
    about = {answer.sample: answer for answer in answers[:: max(1, len(answers) // max(1, most))]}
    found = []
    for sample, answer in about.items():
        picture = next((e.picture for e in dataset.examples(sample)), None)
        if picture is not None:
            found.append((answer, picture))
    return found[:most]


@dataclass
class Conversing:
    """A conversation about images that goes on."""

    questioner: Questioner
    images: list[Any]
    waiting: int  # images that the next words are the first to be about
    history: list[Message] = field(default_factory=list)

    @staticmethod
    def about(files: list[str], config: Config, checkpoint: Path) -> Conversing:
        """One that begins with these image files, asked as the configured dataset asks.

        Raises UserError where the dataset has no conversations, or cannot say how they go.
        """
        component = training_dataset(config)
        try:
            with limited_to(config.trust):
                questioner = registry.get_dataset_class(component.name).questioner(component.options, checkpoint)
        except UserError:
            raise
        except Exception as error:  # of processors that are none for images, or values that no library takes
            raise ConfigError(f"{checkpoint}: its dataset {component.name} cannot ask ({first_line(error)})") from error
        return Conversing(questioner, [_open(file) for file in files], len(files))

    @staticmethod
    def possible(config: Config, checkpoint: Path) -> Conversing | None:
        """One without an image so far; None where the model was not trained on conversations."""
        try:
            return Conversing.about([], config, checkpoint)
        except UserError:
            return None

    def ask(self, text: str) -> Sample:
        """The prompt for an answer to `text`."""
        return self.questioner.ask([*self.history, self._message(text)], self.images)

    def remember(self, text: str, answer: str) -> None:
        """What was said, for what follows."""
        self.history += [self._message(text), Message("assistant", answer)]
        self.waiting = 0

    def command(self, text: str) -> bool:
        """Do what is not a question; whether it was none."""
        word, _, rest = text.strip().partition(" ")
        if word == "image" and rest:
            self.images.append(_open(rest))
            self.waiting += 1
        elif text.strip() == "new":
            self.history, self.waiting = [], len(self.images)
        else:
            return False
        return True

    def _message(self, text: str) -> Message:
        return Message("user", IMAGE * self.waiting + text.replace(IMAGE, ""))


def _open(file: str) -> Any:
    image = require("PIL.Image", "--image")
    try:
        with open_regular(file) as content, image.open(content) as opened:
            return opened.convert("RGB")
    except Exception as error:  # PIL raises whatever its decoders come upon
        raise UserError(f"--image: {file} is not a readable image ({error})") from None
