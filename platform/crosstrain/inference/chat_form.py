"""The form of chat prompts: the training dataset's form, or the tokenizer's chat template."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from crosstrain.config.load import Config
from crosstrain.config.registry import registry
from crosstrain.data.chat import Conversation, PromptBuilder
from crosstrain.data.splits import training_dataset
from crosstrain.inference.encoding import Encoders
from crosstrain.inference.generation import as_prompt
from crosstrain.utils.errors import UserError, explained
from crosstrain.utils.trust import limited_to
from crosstrain.utils.types import Sample


@dataclass(frozen=True)
class ChatForm:
    """The form of chat prompts.

    `prompt` makes a prompt from a conversation and its opened files. `ends` contains the tokens that end an answer.
    """

    prompt: Callable[[Conversation, list[Any]], Sample]  # may raise UserError
    ends: Collection[int]
    builder: PromptBuilder | None = None  # builder of the training dataset; None: use the chat template, without files

    @staticmethod
    def of_template(encoders: Encoders) -> "ChatForm":
        """Return the form that applies the tokenizer's chat template."""

        def prompt(messages: Conversation, _: list[Any]) -> Sample:
            turns = [{"role": message.role, "content": message.text} for message in messages]
            return as_prompt(encoders.encode("chat", turns), encoders.tokenizer.eos_token_id)

        return ChatForm(prompt, encoders.ends)

    @staticmethod
    def of_training(config: Config, checkpoint: Path, encoders: Encoders | None = None) -> "ChatForm":
        """Return the form of the configured dataset. Raises UserError if the dataset cannot build prompts."""
        component = training_dataset(config)
        encode = None if encoders is None else partial(encoders.encode, "words")
        # The configured processor may take no files, or a library may reject its options.
        with explained(f"{checkpoint}: its dataset {component.name} cannot build prompts"), limited_to(config.trust):
            kind = registry.get("dataset", component.name)
            builder: PromptBuilder = kind.prompt_builder(component.options, checkpoint, encode)
        return ChatForm(builder.ask, [builder.end_id], builder)

    @staticmethod
    def possible(config: Config, checkpoint: Path, encoders: Encoders) -> "ChatForm | None":
        """Return the form of the configured dataset; None if the dataset cannot build prompts."""
        try:
            return ChatForm.of_training(config, checkpoint, encoders)
        except UserError:
            return None
