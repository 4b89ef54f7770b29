"""Why workers were started again: the launchers know, rank 0 writes it into the log."""

from __future__ import annotations

import json
import os

VARIABLE = "CROSSTRAIN_STARTED_AGAIN"


def announce(why: str, certainty: int, number: int, most: int) -> None:
    """Let the workers that start next know why they do; nothing for the first.

    Of several nodes, each with its own `why`, the one with the highest `certainty` is told.
    """
    forget()
    if why:
        os.environ[VARIABLE] = json.dumps([certainty, number, most, why])


def forget() -> None:
    os.environ.pop(VARIABLE, None)
