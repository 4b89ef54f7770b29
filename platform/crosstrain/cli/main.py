"""The command line: find the commands, which are plugins, and run one. Only that command's module is imported."""

import argparse
import os
import select
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from crosstrain import __version__
from crosstrain.cli.flags import check_arguments
from crosstrain.config.registry import registry
from crosstrain.utils.errors import UserError, did_you_mean, first_line, printable, refusal, sentence
from crosstrain.utils.program import command

_ELSEWHERE = {  # command of other programs -> command and flags here
    "generate": "evaluate --generate TEXT", "predict": "evaluate --generate TEXT", "eval": "evaluate",
    "test": "evaluate", "run": "train", "fit": "train", "finetune": "train", "pretrain": "train", "sft": "train",
    "resume": "train, which resumes a stopped run", "merge": "export", "convert": "export",
    "chat": "evaluate --interactive --chat", "tokenize": "prepare", "preprocess": "prepare", "init": "new",
}  # fmt: skip
_PROJECT_FLAGS = ("config", "cfg", "config_file", "config_path", "project", "yaml")
_MOST_MISTAKES = 50  # at most this many mistakes of one configuration are printed


class _Parser(argparse.ArgumentParser):
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            other = _ELSEWHERE.get(value) if action.metavar == "VERB" else None
            nearest = did_you_mean(str(value), known, f"choose from {', '.join(known)}")
            hint = f"did you mean {other}?" if other else nearest
            raise argparse.ArgumentError(action, f"unknown value {value!r}; {hint}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {command(*self.prog.split()[1:], '--help')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 0 for success, 1 for an error, 128+n if signal n stopped it."""
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards output that is flushed at exit
        return 141  # 128 + SIGPIPE


def _main(argv: Sequence[str] | None) -> int:
    debug = bool(os.environ.get("CROSSTRAIN_DEBUG"))
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        if not debug:  # hide torch's warnings about a lost node, which have dozens of C++ frames
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        check_arguments(arguments)
        return arguments.run(arguments) or 0
    except UserError as error:
        if debug:
            traceback.print_exc()
        for text in error.sentences[:_MOST_MISTAKES]:
            print(f"error: {sentence(text)}", file=sys.stderr)
        if more := error.sentences[_MOST_MISTAKES:]:
            print(f"error: and {len(more)} more mistakes", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            raise
        if type(error).__name__ == "WorkerFailure":
            text = printable(str(error))
        elif debug:
            raise
        else:
            said = f"{_origin(error)}{type(error).__name__}: {first_line(error)}"
            text = sentence(refusal(error) or f"{said} (set CROSSTRAIN_DEBUG=1 for a traceback)")
        print(f"error: {text}", file=sys.stderr)
        return 1


def _origin(error: Exception) -> str:
    """Return the location of an error's last frame in a plugin or script, as a prefix for the message; "" if none."""
    # Code in the parent folders of these paths belongs to no plugin or script of the user.
    homes = (Path(os.__file__), Path(sysconfig.get_path("purelib"), "package"), Path(__file__).parent)
    installed = (*(str(home.parent) for home in homes), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(installed)]
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: " if frames else ""


def _unread() -> bool:
    """Return True if the program that reads our output, such as `head`, has closed the pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _setting(flag: str) -> str:
    """Return a hint for a flag that names a project setting or passes a project file; an empty string for others."""
    from crosstrain.config.hints import hint_of_key
    from crosstrain.config.run_options import RunOptions

    name = flag.lstrip("-").replace("-", "_")
    if name in _PROJECT_FLAGS:
        return "pass the project file with --cfg-path"
    own = f"the option is run.{name}" if name in {f.name for f in fields(RunOptions)} else hint_of_key(name)
    if own is None or " here: " in own:
        return own or ""
    return f"{own}; set it in the project file, or with --options KEY=VALUE"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. The attribute `run` of the result is the command's method `run`."""
    parser = _Parser(prog="crosstrain", description="Train any model with any runner, chosen in one YAML file.")
    parser.add_argument("--version", action="version", version=f"crosstrain {__version__}")
    commands = parser.add_subparsers(title="verbs", required=True, metavar="VERB", parser_class=_Parser)
    asked: argparse.ArgumentParser = parser
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in {entry.name: entry.summary for entry in registry.entries("command")}.items():
        own_parser = commands.add_parser(name, help=summary.rstrip("."))
        if name == chosen:
            made = registry.get("command", chosen)()
            made.add_arguments(own_parser)
            own_parser.set_defaults(run=made.run, words=argv)
            asked = own_parser
    flags = {*parser._option_string_actions, *asked._option_string_actions}
    for flag in (word.partition("=")[0] for word in takewhile("--".__ne__, argv) if asked is not parser):
        # Check for unknown flags first: argparse would report a misspelled required flag as missing.
        if flag.startswith("--") and " " not in flag and not any(known.startswith(flag) for known in flags):
            hint = _setting(flag) if "--cfg-path" in flags else ""
            asked.error("; ".join(filter(None, (f"unknown flag {flag}", hint or did_you_mean(flag, flags)))))
    return parser.parse_args(argv)
