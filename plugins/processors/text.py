"""Text processors: make conversations from captions, questions and dialogues in annotations."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from crosstrain import IMAGE, Annotation, Conversation, Message, PositiveInt, SampleError, Style, Text, registry

from ..commands.prepare.conversations import KEYS, Turn, conversations

Asked = list[tuple[Conversation, Any, str]]  # (conversation up to the answer, answer or answers, kind of question)
_OTHERS = (("caption", "captions"), ("questions", "vqa"))  # (annotation key, processor that reads it)
_READ = ("from", "role", "value", "content", *KEYS["learned"])  # keys of a turn that are read


@registry.register_processor("captions")
class Caption:
    """Make a conversation from the images, an optional prompt and a caption."""

    @dataclass
    class Options:
        """The caption and its prompts."""

        prompts: list[Text] = field(default_factory=list)  # prompts; training draws one, evaluation uses the first
        key: Text = "caption"  # annotation key of the caption: a text, or a list of texts to draw from
        style: Literal["plain", "chat"] = "plain"  # plain: no chat template, as in BLIP-2
        max_words: PositiveInt | None = None  # truncate captions to this many words; None: no limit
        clean: bool = False  # True: convert to lower case, and replace .!"()*#:;~ with spaces, as in BLIP

    def __init__(self, options: Options) -> None:
        self.options, self.style, self.keys = options, options.style, (options.key,)

    def __call__(self, annotation: Annotation, images: int, rng: np.random.Generator) -> list[Conversation]:
        captions, prompts = self._captions(annotation), self.options.prompts or [""]
        prompt, caption = prompts[rng.integers(len(prompts))], captions[rng.integers(len(captions))]
        return [[self._request(prompt, images), Message("assistant", caption)]]

    def questions(self, annotation: Annotation, images: int) -> Asked:
        prompt = (self.options.prompts or [""])[0]
        return [([self._request(prompt, images)], self._captions(annotation)[0], "caption")]

    def _captions(self, annotation: Annotation) -> list[str]:
        found = annotation.get(self.options.key)
        texts = [found] if isinstance(found, str) else found
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
            raise SampleError(
                f"it has no {self.options.key}" + (f": expected a text, got {str(found)[:50]!r}" if found else "")
            )
        if self.options.clean:
            texts = [re.sub(r'[.!"()*#:;~]', " ", text.lower()) for text in texts]
        return [
            " ".join(text.split()[: self.options.max_words])
            if self.options.clean or self.options.max_words is not None
            else text.strip()
            for text in texts
        ]

    def _request(self, prompt: str, images: int) -> Message:
        return Message("user", IMAGE * images + prompt)


@registry.register_processor("dialogue")
class Dialogue:
    """Read conversations with one or more turns in LLaVA's layout, for Qwen's chat template."""

    style: Style = "chat"

    @dataclass
    class Options:
        """The annotation key of the conversation, and the system prompt."""

        key: Text = "conversations"  # annotation key of a list of {from: human or gpt, value: text}
        system: str | None = "You are a helpful assistant."  # system prompt; None: no system prompt

    def __init__(self, options: Options) -> None:
        self.options = options
        self.keys = tuple(f"{options.key}.{name}" for name in _READ)

    def __call__(self, annotation: Annotation, images: int, rng: np.random.Generator) -> list[Conversation]:
        conversation = self._conversation(annotation, images)
        if conversation[-1].role != "assistant":  # drop an unanswered last turn
            conversation.pop()
        if not any(m.role == "assistant" and m.learned for m in conversation):
            raise SampleError("there is no assistant turn to train on")
        return [conversation]

    def questions(self, annotation: Annotation, images: int) -> Asked:
        messages = self._conversation(annotation, images)
        turns = [(messages[:i], m.text) for i, m in enumerate(messages) if m.role == "assistant" and m.learned]
        return [(before, answer, f"turn {n}") for n, (before, answer) in enumerate(turns, 1)]

    def _conversation(self, annotation: Annotation, images: int) -> Conversation:
        turns = annotation.get(self.options.key)
        if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
            others = [f"; text_processor {name} reads its {key}" for key, name in _OTHERS if key in annotation]
            raise SampleError(f"it has no {self.options.key}{''.join(others)}")
        (found,), _ = conversations({"messages": list(turns)}, images=[])
        messages = [_message(turn) for turn in found.messages]
        first = next((i for i, m in enumerate(messages) if m.role == "user"), None)
        if first is not None and images and not any(IMAGE in m.text for m in messages):
            # Without placeholders, the images go first.
            messages[first] = Message("user", f"{IMAGE * images}\n{messages[first].text}")
        return _told(self.options.system, messages)

    def asked(self, conversation: Conversation) -> Conversation:
        """Format a chat as in training: begin with the system prompt, and put leading images on their own line."""
        lines = [Message(m.role, re.sub(rf"^({IMAGE})+(?!\n|$|{IMAGE})", r"\g<0>\n", m.text)) for m in conversation]
        return _told(self.options.system, lines)


def _told(system: str | None, conversation: Conversation) -> Conversation:
    return [Message("system", system), *conversation] if system and conversation[0].role != "system" else conversation


def _message(turn: Turn) -> Message:
    role = "system" if turn.role == "developer" else turn.role
    if role == "tool" or turn.content is None:
        raise SampleError("a turn is a tool call or a tool result, but only text is supported")
    return Message(role, turn.content, turn.weight != 0)


@registry.register_processor("vqa")
class Questions:
    """Make one conversation per short question about the images, and one for the caption."""

    style: Style = "chat"

    @dataclass
    class Options:
        """Questions to take from an annotation."""

        key: Text = "questions"  # annotation key of a list of {question, answer, kind}; one of several answers is drawn
        caption_key: Text | None = "caption"  # annotation key of a caption to add; None: no captions
        caption_prompt: Text = "describe the image"  # question to ask for the caption
        dialogue_key: Text | None = None  # annotation key of a LLaVA conversation to add; None: no conversations
        per_sample: PositiveInt | None = None  # number of conversations to draw; None: all, packed into one sequence
        system: str | None = None  # system prompt; None: no system prompt

    def __init__(self, options: Options) -> None:
        self.options = options
        key = options.dialogue_key
        self.dialogue = None if key is None else Dialogue(Dialogue.Options(key, options.system))
        own = (f"{options.key}.{name}" for name in ("question", "answer", "kind"))
        self.keys = (*own, options.caption_key or "", *(self.dialogue.keys if self.dialogue else ()))

    def __call__(self, annotation: Annotation, images: int, rng: np.random.Generator) -> list[Conversation]:
        learned = [
            [*before, Message("assistant", answers[rng.integers(len(answers))])]
            for before, answers, _ in self._short(annotation, images)
        ]
        if self.dialogue is not None:  # add one conversation, with all its turns
            learned += self.dialogue(annotation, images, rng)
        if self.options.per_sample is not None and self.options.per_sample < len(learned):
            learned = [learned[i] for i in sorted(rng.choice(len(learned), self.options.per_sample, replace=False))]
        return learned

    def questions(self, annotation: Annotation, images: int) -> Asked:
        turns = self.dialogue.questions(annotation, images) if self.dialogue is not None else []
        return self._short(annotation, images) + [(before, answer, "dialogue") for before, answer, _ in turns]

    def _short(self, annotation: Annotation, images: int) -> Asked:
        """Return (messages, answers, kind) of all single-turn questions."""
        found = annotation.get(self.options.key)
        if not isinstance(found, Sequence) or not all(_is_question(q) for q in found):
            raise SampleError(f"its {self.options.key} are not a list of {{question, answer}}")
        pairs = [(q["question"], _listed(q["answer"]), str(q.get("kind", "question"))) for q in found]
        caption = annotation.get(self.options.caption_key) if self.options.caption_key else None
        if isinstance(caption, str):
            pairs.append((self.options.caption_prompt, [caption], "caption"))
        return [(self.asked([Message("user", f"{IMAGE * images}{q}")]), answers, kind) for q, answers, kind in pairs]

    def asked(self, conversation: Conversation) -> Conversation:
        """Format a chat as in training: begin with the system prompt."""
        return _told(self.options.system, conversation)


def _is_question(entry: Any) -> bool:
    texts = [entry.get("question"), *_listed(entry.get("answer"))] if isinstance(entry, dict) else []
    return len(texts) > 1 and all(isinstance(text, str) for text in texts)


def _listed(answer: Any) -> list[Any]:
    """Return the answers to a question as a list; duplicates are kept."""
    return answer if isinstance(answer, list) else [answer]
