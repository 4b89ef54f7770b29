"""Prompts from the flags and from the keyboard, and their completions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from crosstrain import (
    Conversation,
    Message,
    OpenModel,
    Sample,
    Sampling,
    UserError,
    as_prompt,
    generate,
    printable,
    sentence,
)
from crosstrain.cli.flags import ask
from crosstrain.inference.chat_form import ChatForm


class ChatSession:
    """A growing conversation, and the images that it is about."""

    def __init__(self, form: ChatForm, files: list[str]) -> None:
        self.form = form
        self.images: list[Any] = []  # opened images
        self.waiting = 0  # number of images that no message contains yet
        self.history: Conversation = []
        for file in files:
            self.add(file)

    def add(self, file: str) -> None:
        """Open an image for the next message. Raises UserError if the image cannot be opened."""
        assert self.form.builder is not None
        self.images.append(self.form.builder.open(file))
        self.waiting += 1

    @property
    def commands(self) -> str:
        """One line of help on the commands."""
        return "`image FILE` adds an image, `new` starts over" if self.form.builder else "`new` starts over"

    def ask(self, text: str) -> Sample:
        """Format the prompt for an answer to `text`."""
        return self.form.prompt([*self.history, self._message(text)], self.images)

    def remember(self, text: str, answer: str) -> None:
        """Add an exchange to the history."""
        self.history += [self._message(text), Message("assistant", answer)]
        self.waiting = 0

    def command(self, text: str) -> bool:
        """Run `text` if it is a command; otherwise return False."""
        word, _, rest = text.strip().partition(" ")
        if word == "image" and rest and self.form.builder:
            self.add(rest)
            print(f"added {printable(rest)}; your next message is about {self.waiting} image(s)")
        elif text.strip() == "new":
            self.history, self.images, self.waiting = [], [], 0
        else:
            return False
        return True

    def _message(self, text: str) -> Message:
        """Make a user message, with placeholders for the pending images."""
        return Message("user", self.form.builder.placed(text, self.waiting) if self.form.builder else text)


def talk(model: OpenModel, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Complete the prompts from the flags and from the keyboard. Returns the prompts with their completions."""
    keys = ("max_new_tokens", "temperature", "top_k", "top_p", "num_completions", "seed")
    complete = partial(_complete, model, Sampling(*(given[key] for key in keys)))
    about, form = (model.config, model.checkpoint, model.encoders), None
    if given["image"]:
        form = ChatForm.of_training(*about)
    elif given["chat"]:
        form = ChatForm.possible(*about) or ChatForm.of_template(model.encoders)
    session = None if form is None else ChatSession(form, given["image"])
    found = [{"prompt": p, "completions": complete(p, session, show=model.is_main)} for p in given["generate"]]
    if given["interactive"]:
        if session is None and (form := ChatForm.possible(*about)) is not None:
            session = ChatSession(form, [])
        found += _converse(complete, session)
    return found


def _complete(
    model: OpenModel, sampling: Sampling, prompt: str, session: ChatSession | None, *, show: bool, typed: bool = False
) -> list[str]:
    """Complete a prompt, or answer it in a conversation. A single completion is printed while it is generated.

    typed: the prompt is already on the screen, so only the answer is printed.
    """
    end = model.tokenizer.eos_token_id
    ends = [end] if session is None else session.form.ends
    asked = as_prompt(model.encoders.encode("text", prompt), end) if session is None else session.ask(prompt)
    answer = partial(generate, model.runner, model.tokenizer, asked, sampling, ends=ends)
    if not show or sampling.num_completions > 1:
        texts = answer()
        for number, text in enumerate(texts if show else [], 1):
            print(printable(f"--- completion {number}\n{prompt}{text}"))
        return texts
    if session is None:
        print(prompt, end="")
    elif not typed:
        print(prompt)
    texts = answer(on_text=lambda _, piece: print(printable(piece), end="", flush=True))
    print()
    return texts


def _converse(complete: Callable[..., list[str]], session: ChatSession | None) -> list[dict[str, Any]]:
    """Read prompts from the terminal and complete them, until `stop` or the end of the input.

    Returns the prompts with their completions.
    """
    about = "" if session is None else f"; {session.commands}"
    print(f"type a prompt, or `stop` to end{about}")
    found: list[dict[str, Any]] = []
    while True:
        try:
            prompt = ask()
        except EOFError:
            return found
        if prompt.strip() == "stop":
            return found
        try:
            if session is not None and session.command(prompt):
                continue
            texts = complete(prompt, session, show=True, typed=True)
        except UserError as error:  # a prompt that is too long should not end the conversation
            print(f"error: {sentence(error)}")
            continue
        if session is not None:
            session.remember(prompt, texts[0])
        found.append({"prompt": prompt, "completions": texts})
