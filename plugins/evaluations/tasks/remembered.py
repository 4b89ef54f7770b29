"""Log-likelihoods of earlier evaluations, in the cache folder."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress

import torch

from crosstrain import Group, OpenModel, cache_folder, log
from crosstrain.checkpoint.manifest import MANIFEST
from crosstrain.utils.files import append

Pair = tuple[list[int], list[int]]  # token IDs of a context and of its continuation
Likelihood = tuple[float, bool]  # log p(continuation | context), and whether the continuation is the greedy one


class Remembered:
    """The log-likelihoods of a model, so that a repeated evaluation does not compute them again.

    key: everything that they depend on; None: they are not written to a file. All ranks hold the same ones.
    """

    def __init__(self, key: str | None, world: Group) -> None:
        self._file, self._found = None, dict[str, Likelihood]()
        if key is not None and world.rank == 0:
            self._file = cache_folder("likelihoods") / f"{_hash(key)}.jsonl"
            with suppress(OSError):
                for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
                    with suppress(ValueError):  # the last line may be half written
                        name, value, greedy = json.loads(line)
                        self._found[name] = value, greedy
        self._found = world.broadcast(self._found)

    def of(self, pairs: list[Pair], compute: Callable[[list[Pair]], list[Likelihood]]) -> list[Likelihood]:
        """Return the log-likelihoods of pairs; `compute` is called with those that are not known yet."""
        names = [_hash(json.dumps(pair)) for pair in pairs]
        new = {name: pair for name, pair in zip(names, pairs, strict=True) if name not in self._found}
        if known := len({*names}) - len(new):
            log.info("%d of %d requests are known from an earlier evaluation", known, len({*names}))
        found = dict(zip(new, compute([*new.values()]), strict=True)) if new else {}
        self._found |= found
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            append(self._file, "".join(f"{json.dumps([name, *likelihood])}\n" for name, likelihood in found.items()))
        return [self._found[name] for name in names]


def key_of(model: OpenModel, weights: str | None) -> str | None:
    """Return everything that log-likelihoods depend on, their rounding included; None for a folder without checksums.

    weights: callback whose weights are evaluated.
    """
    manifest, config = model.checkpoint / MANIFEST, model.config.plain
    if not manifest.is_file():
        return None
    run = [config["run"][name] for name in ("amp", "runner", "bitwise", "threads", "device")]
    layout = [weights, config["model"], *run, model.runner.world.size, torch.__version__]
    return manifest.read_text(encoding="utf-8") + json.dumps(layout)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
