"""Who never entered a collective: judged from what every rank has called so far.

Ranks pair the calls of a process group by their order: the n-th of one rank meets the n-th of every other.
"""

from __future__ import annotations

from crosstrain.distributed.watchdog.rank_report import State

SETTLED = 2.0  # seconds without a move before ranks are judged: calls that truly differ never complete
LOCKED = 6.0  # the same, where they may yet turn out to wait for a third
FAR = 1024  # calls after which ranks have shown that they get along, whatever one of them failed to note

_RULE = "a collective must be called by every rank"


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


def deadlock(mine: State, others: list[State], *, failed: bool = False) -> str | None:
    """What is wrong if one rank waits for another, and that one is in a collective which the first has not entered.

    The latter need not be noted: the backends count what torch calls by itself too, such as the exchange of gradients
    in DistributedDataParallel.
    """
    for other in others:
        pair = sorted((mine, other), key=lambda state: state.rank)
        if not (failed or _settled(mine, other, LOCKED)):
            continue
        locked = [(*waits, one, two) for one, two in (pair, pair[::-1])
                  if (waits := _waits_for(one, two)) and _is_ahead(two, one)]  # fmt: skip
        if locked:
            group, number, odd, _ = max(locked, key=lambda item: _oddity(item[2], item[0], item[1], [item[3]]))
            return _never_entered(odd, group, number, [mine, *others])
    return None


def absence(mine: State, others: list[State], silent: list[int]) -> str | None:
    """Which ranks have not entered a collective that this one has, None if there are none.

    `silent` are ranks of which nothing is known.
    """
    for group, here in mine.histories.items():
        if mine.waiting.group != group if mine.waiting else here.in_background:
            continue
        members = [state for state in others if state.rank in here.ranks]
        behind = [state.count(group) for state in members if state.count(group) < here.next]
        lost = [rank for rank in silent if rank in here.ranks]
        if behind or (lost and mine.waiting):
            number = max(min(behind, default=here.next - 1), here.first)
            return _never_entered(mine, group, number, [mine, *members], lost)
        late = [state for state in members if _has_begun(mine, state, group, beyond=state.begun(group))]
        if late:
            said = (
                f"{_ranks([state.rank for state in late])} never entered a collective which rank {mine.rank} waited in "
                f"for {mine.still:.0f} s ({mine.at}{_called(mine)})"
            )
            return "; ".join([said, *_doings(late, group, here.next), _RULE])
    return None


def _settled(one: State, other: State, seconds: float) -> bool:
    """Whether both have stopped for good: for long, or because one is dying."""
    return one.aborting or other.aborting or min(one.still, other.still) >= seconds


def _waits_for(one: State, two: State) -> tuple[str, int] | None:
    """Group and number of the call in which one rank waits for another, if it does."""
    w = one.waiting
    if w is None or two.rank not in one.histories[w.group].ranks or two.count(w.group) > w.number:
        return None
    return w.group, w.number


def _is_ahead(two: State, one: State) -> bool:
    """Whether a rank has begun a collective that another, which waits in one itself, has not."""
    waiting = one.waiting
    assert waiting is not None
    if _waits_for(two, one):
        return True
    # In the group in which `one` waits, what `two` began at the same position is another collective.
    here = one.histories[waiting.group]
    position = here.positions[waiting.number - here.first]
    return any(
        _has_begun(two, one, group, beyond=position if group == waiting.group else one.begun(group))
        for group in one.histories
    )


def _has_begun(two: State, one: State, group: str, beyond: int | None) -> bool:
    """Whether the backend of `two` has begun more collectives than `beyond`, a count of that of `one`."""
    here, there = one.histories.get(group), two.histories.get(group)
    if here is None or there is None or here.ranks != there.ranks or here.in_background or there.in_background:
        return False
    return beyond is not None and there.begun is not None and there.begun > beyond and here.keeps_step(there)


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
    absent = _ranks([state.rank for state in late] + (lost or []))
    clauses = [f"{absent} never entered {call}, which {_ranks(here)} {did} ({place})", *_doings(late, group, number)]
    if lost:
        clauses.append(f"{_ranks(lost)} did not answer")
    return "; ".join([*clauses, _RULE])


def _doings(late: list[State], group: str, number: int) -> list[str]:
    """Where the ranks are that should be in a call, at most three places."""
    doing: dict[str, list[int]] = {}
    for state in late:
        doing.setdefault(_instead(state, group, number), []).append(state.rank)
    return [f"{_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {text}" for text, ranks in doing.items()][:3]


def _instead(state: State, group: str, number: int) -> str:
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
