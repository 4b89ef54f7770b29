"""Trust in a configuration.

The user writes project files and the command line. The configuration in a checkpoint may be untrusted, and names
the sources of data and pretrained weights: a path to read, an address to fetch, a command to run. Without trust, none
of these sources may be used. Code that opens a source named by a configuration calls this module first.

A run signs its configuration with a key that only this user can read, so the user's own checkpoints need no
`--trust-data`. A valid signature shows that this user trained with exactly the sources in the configuration. Nothing
else is signed. The weights, for example, need no signature, because they are only read as tensors.
"""

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import Any

from crosstrain.utils.errors import ConfigError
from crosstrain.utils.files import read_regular

_KEY_BYTES = 32


class Trust(IntEnum):
    """Level of trust: the kinds of sources that a configuration may name."""

    NOTHING = 0  # a checkpoint from others: open no data and no pretrained weights
    DATA = 1  # the user's own or a trusted checkpoint: read, prepare and fetch the data that it names
    COMMANDS = 2  # a project file or command line: a shard may be the output of a command


_current: ContextVar[Trust] = ContextVar("trust", default=Trust.COMMANDS)


@contextmanager
def limited_to(trust: Trust) -> Iterator[None]:
    """Cap the level of trust at `trust` inside the block."""
    token = _current.set(min(trust, _current.get()))
    try:
        yield
    finally:
        _current.reset(token)


def check_source(what: str) -> None:
    """Raise ConfigError unless the configuration may name data and weights to open. `what` is the source."""
    if _current.get() < Trust.DATA:
        raise ConfigError(
            f"{what} is named by a checkpoint that was not trained under this account, so it is not opened; if you "
            f"trust the checkpoint's configuration, add --trust-data"
        )


def check_command(what: str) -> None:
    """Raise ConfigError unless the configuration may name a command to run. `what` is the command."""
    if _current.get() < Trust.COMMANDS:
        raise ConfigError(f"{what}: commands from a checkpoint are not run; pass a project file with --cfg-path")


def names_command(config: Mapping[str, Any]) -> bool:
    """Return True if any of a configuration's data comes from a command."""
    return '"pipe:' in json.dumps(config.get("datasets"))  # a string that begins with pipe:


def signature(config: Mapping[str, Any]) -> str | None:
    """Return this user's signature of a run's configuration; None if no key can be stored.

    The signature covers the keys that determine the sources of a checkpoint's data and weights: `model`, `datasets` and
    `run.runner`.
    """
    key = _key(create=True)
    return None if key is None else _signed(key, json.loads(json.dumps(config)))  # sign the form read back from JSON


def is_own(config: Mapping[str, Any], signed: Any) -> bool:
    """Return True if `signed` is this user's signature of `config`; a checkpoint's state contains both."""
    key = _key(create=False)
    try:
        return key is not None and hmac.compare_digest(_signed(key, config).encode(), str(signed).encode())
    except (ValueError, RecursionError):  # `signed` has a lone surrogate, or `config` is nested too deeply
        return False


def _signed(key: bytes, config: Mapping[str, Any]) -> str:
    run = config.get("run")
    runner = run.get("runner") if isinstance(run, Mapping) else None
    content = json.dumps([config.get("model"), config.get("datasets"), runner], sort_keys=True)
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes | None:
    """Return the user's secret key, created on first use; None if there is no key or it cannot be stored."""
    with suppress(OSError, RuntimeError):
        folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "crosstrain"
        path = folder / "signing.key"
        if create and not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            # Only this user can read the file. os.link is atomic, and fails if a concurrent run has stored a key.
            with tempfile.NamedTemporaryFile(dir=folder) as new, suppress(FileExistsError):
                new.write(secrets.token_bytes(_KEY_BYTES))
                new.flush()
                os.link(new.name, path)
        key = read_regular(path, _KEY_BYTES)
        return key if len(key) == _KEY_BYTES else None
    return None
