"""Who never entered a collective: judged from what every rank has called so far.

Ranks pair the calls of a process group by their order: the n-th of one rank meets the n-th of every other.
"""

from __future__ import annotations

from crosstrain.guard.state import State, Waiting

SETTLED = 2.0  # seconds without a move before ranks are judged: calls that truly differ never complete
LOCKED = 6.0  # the same, where they may yet turn out to wait for a third
FAR = 1024  # calls after which ranks have shown that they get along, whatever one of them failed to note


def mismatch(mine: State, others: list[State], *, failed: bool = False, mispaired: str | None = None) -> str | None:
    """What is wrong if another rank's call cannot be the one that this rank made at the same position, else None.

    Ranks that still move are not judged, unless `failed` says that a collective did. `mispaired` names a group whose
    latest calls are known not to belong together, though nothing but their places may differ.
    """
    for group, here in mine.histories.items():
        for other in others:
            there = other.histories.get(group)
            if there is None or there.ranks != here.ranks:
                continue
            if not (failed or _settled(mine, other, SETTLED)):
                continue
            numbers = range(max(here.first, there.first), min(here.next, there.next))
            pairs = [(n, here.calls[n - here.first], there.calls[n - there.first]) for n in numbers]
            evidence = [n for n, a, b in pairs if not a.fits(b)][:1]
            if evidence and evidence[0] < numbers.stop - FAR:
                continue
            if not evidence and group == mispaired:
                evidence = [n for n, a, b in pairs if a != b][-1:]
            if evidence:
                return _explain(group, evidence[0], mine, other, others)
    return None


def elsewhere(mine: State, others: list[State], *, failed: bool = False) -> str | None:
    """What is wrong if one rank waits in a noted collective, and another is in one that is not, at the same position.

    The backend counts those too that torch calls by itself, such as the gradients of DistributedDataParallel.
    """
    for other in others:
        for one, two in ((mine, other), (other, mine)):
            if one.waiting is None or not (failed or _settled(one, two, LOCKED)):
                continue
            group, number = one.waiting.group, one.waiting.number
            here, there = one.histories[group], two.histories.get(group)
            if there is None or there.ranks != here.ranks or there.next > number or not here.keeps_step(there):
                continue
            if there.begun is not None and there.begun > here.positions[number - here.first]:
                return _never_entered(one, group, number, [mine, *others])
    return None


def deadlock(mine: State, others: list[State]) -> str | None:
    """What is wrong if another rank waits for this one in a group while this one waits for it in another."""
    for other in others:
        if (ours := _waits_for(mine, other)) and (theirs := _waits_for(other, mine)):
            both = sorted([(mine, ours, other), (other, theirs, mine)], key=lambda item: item[0].rank)
            odd, waiting, _ = max(both, key=lambda item: _oddity(item[0], item[1].group, item[1].number, [item[2]]))
            return _never_entered(odd, waiting.group, waiting.number, [mine, *others])
    return None


def absence(mine: State, others: list[State], silent: list[int]) -> str | None:
    """Which ranks have not entered a collective that this one has, None if there are none.

    `silent` are ranks of which nothing is known.
    """
    for group, here in mine.histories.items():
        if here.in_background or (mine.waiting and mine.waiting.group != group):
            continue
        members = [state for state in others if state.rank in here.ranks]
        behind = [state.count(group) for state in members if state.count(group) < here.next]
        lost = [rank for rank in silent if rank in here.ranks]
        if behind or (lost and mine.waiting):
            number = max(min(behind, default=here.next - 1), here.first)
            return _never_entered(mine, group, number, [mine, *members], lost)
    return None


def _settled(one: State, other: State, seconds: float) -> bool:
    """Whether both have stopped for good: for long, or because one is dying."""
    return one.aborting or other.aborting or min(one.still, other.still) >= seconds


def _waits_for(one: State, other: State) -> Waiting | None:
    """The collective in which one rank has waited for another for long, if it does."""
    waiting = one.waiting
    if waiting is None or waiting.seconds < LOCKED or other.rank not in one.histories[waiting.group].ranks:
        return None
    return waiting if other.count(waiting.group) <= waiting.number else None


def _explain(group: str, evidence: int, mine: State, other: State, others: list[State]) -> str:
    everyone = sorted([mine, *others], key=lambda state: state.rank)
    number, owner, proven = _parting(group, evidence, mine, other, everyone)
    call, theirs = owner.call(group, number), (other if owner is mine else mine).call(group, number)
    assert call is not None
    assert theirs is not None
    if not proven and (call.operation, call.place) == (theirs.operation, theirs.place):
        a, b = sorted((mine, other), key=lambda state: state.rank)
        return (
            f"rank {a.rank} entered {a.call(group, number)} and rank {b.rank} {b.call(group, number)}, both at "
            f"{call.place}; what a collective exchanges must have one size on every rank"
        )
    return _never_entered(owner, group, number, everyone, strictly=call.fits(theirs))


def _parting(group: str, evidence: int, mine: State, other: State, everyone: list[State]) -> tuple[int, State, bool]:
    """At which call two ranks went apart, not after `evidence`, whose of the two calls is the odd one, and if for sure.

    It is the one without which the ranks' further calls agree. Where nothing follows yet, the likelier one.
    """
    a, b = sorted((mine, other), key=lambda state: state.rank)
    number, agreeing = evidence, 0
    owner = max((a, b), key=lambda state: _oddity(state, group, evidence, everyone))
    for odd, even in ((a, b), (b, a)):
        longer, shorter = odd.histories[group], even.histories[group]
        for n in range(max(longer.first, shorter.first), evidence + 1):
            if longer.get(n) == shorter.get(n):
                continue
            moved = 0
            while (call := shorter.get(n + moved)) and call == longer.get(n + 1 + moved):
                moved += 1
            if moved > agreeing:
                number, owner, agreeing = n, odd, moved
    return number, owner, agreeing > 0


def _oddity(state: State, group: str, number: int, everyone: list[State]) -> tuple[bool, int, int]:
    """How likely a rank's call is the odd one: others never made it, plugged-in code did, and on few ranks."""
    call = state.call(group, number)
    assert call is not None
    others = [other for other in everyone if other is not state and other.call(group, number) != call]
    unknown = not any(call in other.histories[group].calls for other in others if group in other.histories)
    called_from_outside = state.waits_at(group, number) and state.caller is not None
    return unknown, 2 * call.place.is_plugged_in or int(called_from_outside), len(others)


def _never_entered(
    owner: State, group: str, number: int, everyone: list[State], lost: list[int] | None = None, strictly: bool = False
) -> str:
    """The sentence about ranks that did not enter the call of `owner`; `strictly` tells calls apart by place alone."""
    call = owner.call(group, number)
    assert call is not None
    here: list[int] = []
    late: list[State] = []
    for state in everyone:
        if state.rank not in owner.histories[group].ranks:
            continue
        theirs = state.call(group, number)
        if theirs == call or (theirs and theirs.fits(call) and not strictly):
            here.append(state.rank)
        elif theirs or state.count(group) <= number:
            late.append(state)
    if owner.waits_at(group, number):
        assert owner.waiting is not None
        did = f"waited in for {owner.waiting.seconds:.0f} s"
        place = f"{call.place}{_called(owner)}"
    else:
        did = f"called over {owner.still:.0f} s ago" if owner.still >= SETTLED else "called"
        place = str(call.place)
    doing: dict[str, list[int]] = {}
    for state in late:
        doing.setdefault(_instead(state, group, number), []).append(state.rank)
    absent = _ranks([state.rank for state in late] + (lost or []))
    clauses = [f"{absent} never entered {call}, which {_ranks(here)} {did} ({place})"]
    clauses += [f"{_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {text}" for text, ranks in doing.items()][:3]
    if lost:
        clauses.append(f"{_ranks(lost)} did not answer")
    return "; ".join([*clauses, "a collective must be called by every rank"])


def _instead(state: State, group: str, number: int) -> str:
    """Where a rank is that should be in a call."""
    if state.waiting and (call := state.call(state.waiting.group, state.waiting.number)):
        return f"in {call} ({call.place}{_called(state)})"
    if call := state.call(group, number):
        return f"in {call} ({call.place})"
    return f"at {state.at}{_called(state)}"


def _called(state: State) -> str:
    return f", called at {state.caller}" if state.caller else ""


def _ranks(ranks: list[int]) -> str:
    shown = [str(rank) for rank in sorted(ranks)]
    if len(shown) > 8:
        shown = [*shown[:7], f"{len(shown) - 7} others"]
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
