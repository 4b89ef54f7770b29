"""`crosstrain serve`: serve a checkpoint through an OpenAI-compatible API."""

import argparse
import os
from pathlib import Path

from crosstrain import Command, UserError, printable, registry, require
from crosstrain.cli.flags import CHECKPOINT, WEIGHTS, add_config, add_flags, positive, seconds

_KEY = "CROSSTRAIN_API_KEY"

_FLAGS = {
    "--host": {"default": "127.0.0.1", "metavar": "ADDRESS", "help": "address to listen on (default: 127.0.0.1)"},
    "--port": {
        "type": int,
        "default": 8000,
        "metavar": "N",
        "help": "port to listen on (default: 8000); 0: a free port",
    },
    "--name": {"metavar": "NAME", "help": "model name shown to clients (default: the run folder's name)"},
    "--api-key": {"metavar": "KEY", "help": "key that clients must send (default: $CROSSTRAIN_API_KEY)"},
    "--batch": {
        "type": positive,
        "default": 8,
        "metavar": "N",
        "help": "maximum number of sequences in a batch (default: 8)",
    },
    "--max-waiting": {
        "type": positive,
        "default": 512,
        "metavar": "N",
        "help": "maximum number of waiting completions; more are refused (default: 512)",
    },
    "--timeout": {
        "type": seconds,
        "default": 600,
        "metavar": "SECONDS",
        "help": "time limit for a request (default: 600)",
    },
    "--header-timeout": {
        "type": seconds,
        "default": 10,
        "metavar": "SECONDS",
        "help": "time limit for a request's headers to arrive (default: 10)",
    },
}


@registry.register_command("serve")
class ServeCommand(Command):
    """Serve a checkpoint through an OpenAI-compatible API and a web page."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_flags(parser, CHECKPOINT | WEIGHTS)
        add_config(parser, required=False)
        add_flags(parser, _FLAGS)

    def run(self, arguments: argparse.Namespace) -> int:
        """Serve a checkpoint until a signal arrives; return the exit code."""
        print(f"loading {printable(arguments.checkpoint)} ...", flush=True)  # the imports take seconds
        for module in ("uvicorn", "starlette"):
            require(module, "serving")
        from crosstrain.distributed.launch.launcher import launch
        from crosstrain.inference.encoding import check_stored
        from crosstrain.inference.open_checkpoint import find_model, open_on_workers

        from .limits import Limits
        from .server import serve_worker

        limits = Limits(
            arguments.batch, arguments.max_waiting, arguments.timeout, header_seconds=arguments.header_timeout
        )
        checkpoint = find_model(arguments.checkpoint, arguments.weights)
        key = os.environ.get(_KEY) if arguments.api_key is None else arguments.api_key
        if key is not None and not key.strip():
            raise UserError(
                f"--api-key, ${_KEY}: expected a key that is not empty; leave it out to serve without a key"
            )
        config, how = open_on_workers(
            checkpoint, arguments.cfg_path, arguments.options, arguments.trust_data, arguments.nproc_per_node
        )
        name = arguments.name or _name(checkpoint)
        job = vars(arguments) | {"checkpoint": checkpoint, "name": name, "api_key": key, "trust": config.trust}
        check_stored(checkpoint)
        code = launch(serve_worker, (config.plain, job, limits, how.starts_workers), how)
        return 0 if code > 128 else code  # a signal is the normal end of a server


def _name(checkpoint: Path) -> str:
    """Return the run folder's name for a checkpoint in a run, else the checkpoint's own name."""
    folder = checkpoint.resolve()
    return (folder.parents[1] if folder.parent.name == "checkpoints" else folder).name or "model"
