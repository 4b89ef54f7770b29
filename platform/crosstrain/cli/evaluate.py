"""`crosstrain evaluate`: loss, perplexity, scores and text from a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from crosstrain.cli.command import Command
from crosstrain.cli.flags import add_checkpoint, add_config, add_weights, ask, new_file
from crosstrain.config.registry import registry
from crosstrain.utils.errors import UserError, printable, sentence

if TYPE_CHECKING:
    from crosstrain.api.model import OpenModel
    from crosstrain.inference.conversation import ChatSession
    from crosstrain.inference.generation import Sampling


@registry.register_command("evaluate")
class EvaluateCommand(Command):
    """Compute loss, perplexity, scores and text from a checkpoint."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        splits: dict[str, Any] = {
            "nargs": "*",
            "default": None,
            "choices": ("train", "val", "test"),
            "metavar": "SPLIT",
        }
        add_checkpoint(parser)
        add_config(parser, required=False)
        add_weights(parser)
        parser.add_argument(
            "--splits", help="default: val and test if they have samples, unless the flags ask for text", **splits
        )
        parser.add_argument("--max-samples", type=int, metavar="N", help="at most N samples of each split")
        parser.add_argument("--generate", nargs="+", default=[], metavar="PROMPT", help="complete these prompts")
        parser.add_argument(
            "--chat", action="store_true", help="the prompts are a user's turns, in the form of training"
        )
        parser.add_argument("--image", nargs="+", default=[], metavar="FILE", help="images that the prompts are about")
        parser.add_argument(
            "--answers", help="ask the questions of these splits (default: test) and score the answers", **splits
        )
        parser.add_argument(
            "--sheet", type=new_file, metavar="FILE", help="a picture of images, questions and --answers"
        )
        parser.add_argument(
            "--tasks", nargs="+", default=[], metavar="NAME", help="tasks of lm-evaluation-harness to run"
        )
        parser.add_argument("--task-path", metavar="DIR", help="a folder with more task files of the harness")
        parser.add_argument("--interactive", action="store_true", help="complete prompts as you type them; `stop` ends")
        parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of each text (default: 64)")
        parser.add_argument(
            "--temperature",
            type=float,
            default=1.0,
            metavar="T",
            help="default: 1, which samples; 0 takes the likeliest token",
        )
        parser.add_argument(
            "--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest tokens (default: 0, all)"
        )
        parser.add_argument(
            "--top-p",
            type=float,
            default=1.0,
            metavar="P",
            help="sample among the likeliest tokens whose probabilities sum to P (default: 1)",
        )
        parser.add_argument("--num-completions", type=int, default=1, metavar="N", help="of each prompt (default: 1)")
        parser.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
        parser.add_argument("--output", type=new_file, metavar="FILE", help="write the results as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Evaluate a checkpoint and return the exit code."""
        from crosstrain.api.evaluate import start_evaluation
        from crosstrain.inference.generation import Sampling

        a = arguments
        talks = a.generate or a.interactive
        if a.image and not talks:
            raise UserError("--image: ask about it with --generate or --interactive")
        if a.chat and not talks:
            raise UserError("--chat: say something with --generate or --interactive")
        answers = [] if a.answers is None else a.answers or ["test"]
        splits = [] if a.splits is None and (talks or answers or a.tasks) else a.splits
        sampling = Sampling(a.max_new_tokens, a.temperature, a.top_k, a.top_p, a.num_completions, a.seed)
        job = vars(a) | {"splits": splits, "answers": answers, "sampling": sampling}
        return start_evaluation(job, _talk if talks else None, alone=a.interactive)


def _talk(model: OpenModel, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Complete the prompts from the flags and from the keyboard. Returns the prompts with their completions."""
    from crosstrain.inference.conversation import ChatSession

    complete = partial(_complete, model, job["sampling"])
    about, found = (model.config, model.checkpoint, model.encoders), []
    talk: ChatSession | None = None
    if job["image"]:
        talk = ChatSession.about(job["image"], *about)
    elif job["chat"]:
        talk = ChatSession.possible(*about) or ChatSession.in_template(model.encoders, model.tokenizer)
    for prompt in job["generate"]:
        texts = complete(prompt, talk, show=model.runner.world.rank == 0)
        found.append({"prompt": prompt, "completions": texts})
    if job["interactive"]:
        found += _converse(complete, talk or ChatSession.possible(*about))
    return found


def _complete(
    model: OpenModel, sampling: Sampling, prompt: str, talk: ChatSession | None, *, show: bool, typed: bool = False
) -> list[str]:
    """Complete a prompt, or answer it in a conversation. A single completion is printed as it grows.

    typed: the prompt is already on the screen, so only the answer is printed.
    """
    from crosstrain.inference.generation import as_prompt, generate

    end = model.tokenizer.eos_token_id
    ends = [end] if talk is None else talk.ends
    asked = as_prompt(model.encoders.encode("text", prompt), end) if talk is None else talk.ask(prompt)
    answer = partial(generate, model.runner, model.tokenizer, asked, sampling, end=ends)
    if not show or sampling.num_completions > 1:
        texts = answer()
        for number, text in enumerate(texts if show else [], 1):
            print(printable(f"--- completion {number}\n{prompt}{text}"))
        return texts
    if talk is None:
        print(prompt, end="")
    elif not typed:
        print(prompt)
    texts = answer(on_text=lambda _, piece: print(printable(piece), end="", flush=True))
    print()
    return texts


def _converse(complete: Callable[..., list[str]], talk: ChatSession | None) -> list[dict[str, Any]]:
    """Complete typed prompts until `stop` or the end of the input. Returns the prompts with their completions."""
    about = "" if talk is None else f"; {talk.commands}"
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
            if talk is not None and talk.command(prompt):
                continue
            texts = complete(prompt, talk, show=True, typed=True)
        except UserError as error:  # a prompt that is too long should not end the conversation
            print(f"error: {sentence(error)}")
            continue
        if talk is not None:
            talk.remember(prompt, texts[0])
        found.append({"prompt": prompt, "completions": texts})
