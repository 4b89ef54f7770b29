"""Find what a resume does not restore, by comparing a runner with itself."""

import math

from .diagnosis import MOST, Finding
from .tolerance import Record, listed, steps_of

_EQUAL = 1e-6  # larger relative differences from equal inputs on equal ranks are errors in any precision


def diagnose_interruption(resumed: Record, record: Record) -> Finding | None:
    """Compare the first update after a resume with the same update of the runner's own run without an interruption.

    Both have the same ranks. If their gradients have the same bits, so must their updates; errors below the noise
    between two layouts show here.
    """
    step, number = resumed["steps"][0], resumed["rows"][0]["step"]
    uninterrupted = steps_of(record)[number]
    reproduced = step["gradients"]["products"] == uninterrupted["gradients"]["products"]  # not so on some GPUs
    if not record["exact"] or not reproduced:
        return None
    wrong, decayed = [], []
    for name, (*changed, mm, mw, ww) in step["weights"]["products"].items():
        # changes of the dot products of difference d, update m and weight w
        dd, dm, dw = (a - b for a, b in zip(changed, uninterrupted["weights"]["products"][name], strict=False))
        both, share = math.sqrt(mm * ww), dw / max(ww, 1e-30)
        if max(abs(dd), abs(dm)) > _EQUAL * mm or abs(dw) > _EQUAL * both:
            wrong.append(name)
            decayed.append(abs(dm - share * mw) <= 0.2 * abs(share) * both)
    if not wrong:
        return None
    cause = "a setting of the optimizer that is not restored"
    if sum(decayed) >= MOST * len(wrong):  # each weight changed by a share of itself
        cause = "weight decay: its rate is not restored"
    said = f"after a resume, step {number} updates {listed(wrong)} differently, with equal gradients"
    return Finding("resume", f"{said}: {cause}", wrong, [], cause)
