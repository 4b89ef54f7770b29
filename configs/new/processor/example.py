"""A processor of annotations, the texts that belong to a sample's images."""

from dataclasses import dataclass

import numpy as np

from crosstrain import IMAGE, Annotation, Conversation, Message, SampleError, Style, Text, TextProcessor, registry


@registry.register_processor("example")
class ExampleProcessor(TextProcessor):
    """Converts a question about the images and its answer to a conversation."""

    style: Style = "chat"  # chat: the tokenizer's chat template; plain: the texts, concatenated

    @dataclass
    class Options:
        question: Text = "question"  # key of the question in an annotation
        answer: Text = "answer"  # key of the answer

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(self, annotation: Annotation, images: int, rng: np.random.Generator) -> list[Conversation]:
        """Return the conversations to train on; `rng` is the only allowed source of randomness."""
        return [[*asked, Message("assistant", answer)] for asked, answer, _ in self.questions(annotation, images)]

    def questions(self, annotation: Annotation, images: int) -> list[tuple[Conversation, str, str]]:
        """Return (conversation up to the answer, answer, kind of question), for `evaluate --answers`."""
        question, answer = (annotation.get(key) for key in (self.options.question, self.options.answer))
        if not isinstance(question, str) or not isinstance(answer, str):
            raise SampleError(f"it has no {self.options.question} or no {self.options.answer}")  # skips it
        return [([Message("user", IMAGE * images + question)], answer, "question")]
