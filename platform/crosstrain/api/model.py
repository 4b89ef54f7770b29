"""The model of a checkpoint, opened in this process."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from crosstrain.config.load import Config, ProjectLike
from crosstrain.config.run_options import DEFAULT_RUNNER
from crosstrain.config.sources import Overrides, pairs
from crosstrain.data.chat import Message
from crosstrain.engine.build import make_runner
from crosstrain.inference.chat_form import ChatForm
from crosstrain.inference.encoding import Encoders
from crosstrain.inference.generation import Sampling, as_prompt, generate, room_after
from crosstrain.inference.open_checkpoint import find_model, load_model, open_on_workers
from crosstrain.utils.types import Batch, Sample

Turns = Sequence[Mapping[str, Any]]  # {"role": "user", "content": "..."}, in OpenAI's format


class OpenModel(AbstractContextManager["OpenModel"]):
    """A model for generation, chat and evaluation. Its methods are collective if several ranks opened the model.

    Methods that take or return text need the tokenizer in the checkpoint. A separate process encodes prompts, and ends
    at `close` or at the end of the `with` block. Methods raise UserError for invalid prompts. The keywords in
    `sampling` are max_new_tokens (64), temperature (1.0; 0 takes the likeliest token), top_k, top_p and seed.
    """

    def __init__(self, config: Config, checkpoint: Path, *, text: bool = False, weights: str | None = None) -> None:
        config = replace(config, run=replace(config.run, objective=None))  # only losses on splits need the objective
        self.config, self.checkpoint = config, checkpoint
        self.runner = make_runner(config)
        self.runner.setup()
        if text:  # load the tokenizer first, so that its errors come early
            _ = self.encoders
        load_model(config, self.runner, checkpoint, weights)

    @cached_property
    def encoders(self) -> Encoders:
        return Encoders(self.checkpoint)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes."""
        return self.runner.world.rank == 0

    @property
    def module(self) -> torch.nn.Module:
        """The model in evaluation mode.

        For a language model, `module.lm` is the transformers model; its vocabulary may be padded.
        """
        return self.runner.model.eval()

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer (a transformers object), for decoding."""
        return self.encoders.tokenizer

    @cached_property
    def _form(self) -> ChatForm | None:
        return ChatForm.possible(self.config, self.checkpoint, self.encoders)

    def generate(self, prompt: str, **sampling: Any) -> str:
        """Return a completion of `prompt`, without the prompt."""
        end = self.tokenizer.eos_token_id
        return self._answer(as_prompt(self.encoders.encode("text", prompt), end), [end], sampling)

    def chat(self, messages: str | Turns, *, files: Sequence[str | Path] = (), **sampling: Any) -> str:
        """Return the answer to a message, or to the last message of a conversation, formatted as in training.

        The format is the dataset's own format, or the tokenizer's chat template if the dataset has no format. files:
        images, or other files that the dataset supports, for the first user message.
        """
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        turns: list[dict[str, Any]] = [dict(message) for message in given]
        form = self._form
        if files and form is None:  # `of_training` raises a UserError that gives the reason
            form = ChatForm.of_training(self.config, self.checkpoint, self.encoders)
        if form is None or form.builder is None:
            asked = as_prompt(self.encoders.encode("chat", turns), self.tokenizer.eos_token_id)
            return self._answer(asked, self.encoders.ends, sampling)
        opened = [form.builder.open(str(file)) for file in files]
        first = next((turn for turn in turns if turn["role"] == "user"), turns[0])
        first["content"] = form.builder.placed(first["content"], len(opened))
        asked = form.prompt([Message(t["role"], t["content"]) for t in turns], opened)
        return self._answer(asked, form.ends, sampling)

    def _answer(self, prompt: Sample, ends: Collection[int], sampling: dict[str, Any]) -> str:
        return generate(self.runner, self.tokenizer, prompt, Sampling(**sampling), None, ends)[0]

    def loss(self, given: str | Batch) -> float:
        """Return the mean loss per target of a batch; for a text, in nats per token.

        A batch has the format that the dataset's `collate` returns. In a text, every token is a target, and the first
        token follows an end-of-text token, as in lm-evaluation-harness.
        """
        batch = given
        if isinstance(batch, str):
            ids = self.encoders.encode("text", batch)
            before = as_prompt([self.tokenizer.eos_token_id, *ids[:-1]], 0)
            room_after(self.runner.model, before, least=0)
            batch = {"input_ids": torch.from_numpy(before["input_ids"])[None], "labels": torch.tensor([ids])}
        with self.runner.evaluating():
            return self.runner.evaluate(batch).item() / max(self.runner.objective.num_targets(batch), 1)

    def close(self) -> None:
        """End the process that encodes prompts, and leave the process group."""
        if "encoders" in vars(self):
            self.encoders.close()
        self.runner.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def open(
    checkpoint: str | Path,
    options: Overrides = (),
    *,
    project: ProjectLike | None = None,
    trust_data: bool = False,
    weights: str | None = None,
) -> OpenModel:
    """Open a checkpoint, a run's newest checkpoint, or a language model's Hugging Face folder, in this process.

    The configuration comes from the checkpoint or from `project`, and `options` override it. Code in a checkpoint is
    never run. If others trained the checkpoint, the data and weights that it names are opened only with `trust_data`.
    weights: name of a callback, such as "ema", to use the callback's weights. Raises CheckpointError or ConfigError.
    """
    found = find_model(checkpoint, weights)
    given = pairs(options)
    if not any(key.startswith("run.runner") for key, _ in given):
        given.append(("run.runner", DEFAULT_RUNNER))
    config, _ = open_on_workers(found, project, given, trust_data, None, True)
    return OpenModel(config, found, weights=weights)
