"""`crosstrain serve`: a checkpoint behind OpenAI's interface."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from crosstrain.checkpoint import folders
from crosstrain.distributed.launch.launcher import Launch, launch
from crosstrain.inference.open_checkpoint import check_model, check_ranks, chosen_config, open_tokenizer
from crosstrain.serving.encoding import check_decoder
from crosstrain.serving.limits import Limits
from crosstrain.serving.server import ServerOptions, serve_worker
from crosstrain.utils.errors import UserError
from crosstrain.utils.optional_deps import require

_KEY = "CROSSTRAIN_API_KEY"


def serve(arguments: argparse.Namespace) -> int:
    """Serve `arguments.checkpoint` until a signal comes; returns the exit code."""
    for module in ("uvicorn", "starlette", "pydantic"):
        require(module, "serving")
    limits = Limits(
        arguments.batch, arguments.max_waiting, arguments.timeout, header_seconds=arguments.header_timeout
    )  # fmt: skip
    checkpoint = folders.find_checkpoint(Path(arguments.checkpoint))
    key = os.environ.get(_KEY) if arguments.api_key is None else arguments.api_key
    if key is not None and not key.strip():
        raise UserError(f"--api-key, ${_KEY}: an empty key lets nobody in; leave it out to need none")
    place = ServerOptions(checkpoint, arguments.name or _name(checkpoint), arguments.host, arguments.port, key)
    if not 0 <= place.port < 65536:
        raise UserError(f"--port: {place.port} is not between 0 and 65535")
    config = chosen_config(checkpoint, arguments)
    place = replace(place, trust=config.trust)
    how = Launch.detect(arguments.nproc_per_node, config.run.device)
    check_ranks(config, how.world_size)
    check_model(config, checkpoint)
    check_decoder(open_tokenizer(checkpoint), checkpoint)
    code = launch(serve_worker, (config.plain, place, limits, how.starts_workers), how)
    return 0 if code > 128 else code  # a signal is how a server ends


def _name(checkpoint: Path) -> str:
    """A run's folder's name for one of its checkpoints, else its own."""
    folder = checkpoint.resolve()
    return (folder.parents[1] if folder.parent.name == "checkpoints" else folder).name or "model"
