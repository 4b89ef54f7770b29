"""Why workers were started again: the launchers know, rank 0 writes it into the log."""

from __future__ import annotations

import json
import os

from crosstrain.distributed.group import Group
from crosstrain.monitor.progress import log

_VARIABLE = "CROSSTRAIN_STARTED_AGAIN"


def announce(why: str, certainty: int, number: int, most: int) -> None:
    """Let the workers that start next know why they do; nothing for the first.

    Of several nodes, each with its own `why`, the one with the highest `certainty` is told.
    """
    forget()
    if why:
        os.environ[_VARIABLE] = json.dumps([certainty, number, most, why])


def forget() -> None:
    os.environ.pop(_VARIABLE, None)


def tell(world: Group, step: int) -> None:
    """Log, if so, that these workers were started again, and go on from `step`. Collective."""
    reasons = [json.loads(reason) for reason in world.all_gather(os.environ.get(_VARIABLE)) if reason]
    if reasons:
        _, number, most, why = max(reasons)
        log.info("%s; all ranks started again (restart %d of %d) and go on from step %d", why, number, most, step)
