"""Trust in a configuration.

A project file and the command line are the user's own words. The configuration in a checkpoint is written by whoever
wrote the checkpoint, and says where data and pretrained weights are: a path to read, an address to fetch, a command to
run. Without trust it decides none of that, and the code that opens what a configuration names asks here first.

A run signs its configuration with a key that only this user can read, so one's own checkpoints need no flag: a
signature that the key confirms says that this user trained with this very configuration. It vouches for nothing else,
weights least of all: those are only ever numbers.
"""

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import Any

from crosstrain.utils.errors import ConfigError
from crosstrain.utils.files import read_regular

_KEY_BYTES = 32


class Trust(IntEnum):
    """Level of trust: the kinds of decisions that a configuration may make."""

    NOTHING = 0  # a stranger's checkpoint: no data and no pretrained weights are opened
    DATA = 1  # this user's own checkpoint, or a trusted one: data that it names is read, prepared and fetched
    COMMANDS = 2  # the user's own words: a shard may be the output of a command


_current: ContextVar[Trust] = ContextVar("trust", default=Trust.COMMANDS)


@contextmanager
def limited_to(trust: Trust) -> Iterator[None]:
    """Limit trust inside the block to `trust`."""
    token = _current.set(min(trust, _current.get()))
    try:
        yield
    finally:
        _current.reset(token)


def check_source(what: str) -> None:
    """Raise ConfigError unless data and weights that the configuration names may be opened; `what` names them."""
    if _current.get() < Trust.DATA:
        raise ConfigError(
            f"{what} is named by a checkpoint that was not trained under this account, so it is not opened; if you "
            f"trust the checkpoint's configuration: --trust-data"
        )


def check_command(what: str) -> None:
    """Raise ConfigError unless the configuration may name a command to run; `what` is the command."""
    if _current.get() < Trust.COMMANDS:
        raise ConfigError(f"{what}: a command is not run on a checkpoint's word; name a project file with --cfg-path")


def names_command(config: Mapping[str, Any]) -> bool:
    """True for a configuration whose data come from a command."""
    return '"pipe:' in json.dumps(config.get("datasets"))  # a text that begins so


def signature(config: Mapping[str, Any]) -> str | None:
    """Return this user's signature of a run's configuration; None where no key can be kept.

    It covers what decides where a checkpoint's data and weights come from: `model`, `datasets` and `run.runner`.
    """
    key = _key(create=True)
    return None if key is None else _signed(key, json.loads(json.dumps(config)))  # as it will be read


def is_own(config: Mapping[str, Any], signed: Any) -> bool:
    """Check that `signed` is this user's signature of `config`, as a checkpoint's state holds both."""
    key = _key(create=False)
    try:
        return key is not None and hmac.compare_digest(_signed(key, config).encode(), str(signed).encode())
    except (ValueError, RecursionError):  # half a character, or values nested too deep
        return False


def _signed(key: bytes, config: Mapping[str, Any]) -> str:
    run = config.get("run")
    runner = run.get("runner") if isinstance(run, Mapping) else None
    content = json.dumps([config.get("model"), config.get("datasets"), runner], sort_keys=True)
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes | None:
    """Return the user's secret key, made on first use; None where there is none, or no place for it."""
    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "crosstrain"
        path = folder / "signing.key"
        if create and not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as new:  # which only its owner can read
                new.write(secrets.token_bytes(_KEY_BYTES))
                new.flush()
                os.link(new.name, path)  # whole or not at all; not over the key of a run that was quicker
        key = read_regular(path, _KEY_BYTES)
    except FileExistsError:
        return _key(create=False)
    except (OSError, RuntimeError):
        return None
    return key if len(key) == _KEY_BYTES else None
