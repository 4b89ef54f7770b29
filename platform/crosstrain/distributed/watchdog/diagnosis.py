"""Find the ranks that never entered a collective, from the recorded calls of every rank.

Calls on a process group are matched by order: the n-th call of a rank meets the n-th call of every other rank.
"""

from crosstrain.distributed.watchdog.flight_recorder import RankReport

SETTLED = 2.0  # calls are compared after this many idle seconds, because mismatched calls usually hang
DEADLOCKED = 6.0  # idle seconds before a deadlock is reported, because both ranks may only be waiting for a third one
# A mismatch followed by this many more calls is ignored: the ranks evidently agree, and one call was not recorded.
FORGIVEN = 1024

_RULE = "a collective must be called by every rank"


def find_desync(
    mine: RankReport, others: list[RankReport], *, failed: bool = False, desynced: str | None = None
) -> str | None:
    """Describe a call of another rank that does not match this rank's collective at the same position.

    Only idle ranks are compared, unless a collective has failed or a rank is aborting. desynced: a group in which the
    latest calls are known to mismatch, even if only their locations differ.
    """
    for group, here in mine.histories.items():
        for other in others:
            there = other.histories.get(group)
            settled = min(mine.idle_seconds, other.idle_seconds) >= SETTLED
            if there is None or there.ranks != here.ranks or not (settled or failed or mine.aborting or other.aborting):
                continue
            numbers = range(max(here.first, there.first), min(here.next, there.next))
            pairs = [(n, here[n], there[n]) for n in numbers]
            evidence = [n for n, a, b in pairs if not a.matches(b)][:1]
            if evidence and evidence[0] < numbers.stop - FORGIVEN:
                continue
            if not evidence and group == desynced:
                evidence = [n for n, a, b in pairs if a != b][-1:]
            if evidence:
                return _explain(group, evidence[0], mine, other, others)
    return None


def find_deadlock(mine: RankReport, others: list[RankReport], *, failed: bool = False) -> str | None:
    """Describe a rank that waits for this rank in a collective on one group, while this rank waits for it on another.

    Only idle ranks are compared, unless a collective has failed.
    """
    for other in others:
        settled = min(mine.idle_seconds, other.idle_seconds) >= DEADLOCKED
        if (failed or settled) and _waits_for(mine, other) and _waits_for(other, mine):
            pair = sorted((mine, other), key=lambda report: report.rank)
            calls = [(report, report.waiting.group, report.waiting.number) for report in pair if report.waiting]
            odd, group, number = max(calls, key=lambda call: _oddity(call[0], call[1], call[2], pair))
            return _never_entered(odd, group, number, [mine, *others])
    return None


def _waits_for(one: RankReport, two: RankReport) -> bool:
    """Return True if rank `one` is in a collective that rank `two` must enter and has not entered."""
    w = one.waiting
    return w is not None and two.rank in one.histories[w.group].ranks and two.count(w.group) <= w.number


def find_absent(mine: RankReport, others: list[RankReport], silent: list[int]) -> str | None:
    """Describe the ranks that have not entered a collective that this rank has entered.

    silent: ranks that sent no report.
    """
    for group, here in mine.histories.items():
        if mine.waiting.group != group if mine.waiting else here.has_background_calls:
            continue
        members = [report for report in others if report.rank in here.ranks]
        behind = [report.count(group) for report in members if report.count(group) < here.next]
        lost = [rank for rank in silent if rank in here.ranks]
        if behind or (lost and mine.waiting):
            number = max(min(behind, default=here.next - 1), here.first)
            return _never_entered(mine, group, number, [mine, *members], lost)
    return None


def describe_mute(mine: RankReport, mute: list[int]) -> str:
    """Describe the ranks that have not answered since this rank became idle, whether or not it is in a collective."""
    return (
        f"{name_ranks(mute)} did not answer for {mine.idle_seconds:.0f} s, while rank {mine.rank} waited at "
        f"{mine.location}{_called_at(mine)}; a stopped process or a lost machine causes this"
    )


def _explain(group: str, evidence: int, mine: RankReport, other: RankReport, others: list[RankReport]) -> str:
    everyone = sorted([mine, *others], key=lambda report: report.rank)
    number, owner, proven = _parting(group, evidence, mine, other, everyone)
    call, theirs = (report.histories[group][number] for report in (owner, other if owner is mine else mine))
    if not proven and (call.operation, call.location) == (theirs.operation, theirs.location):
        a, b = sorted((mine, other), key=lambda report: report.rank)
        return (
            f"rank {a.rank} entered {a.call(group, number)} and rank {b.rank} {b.call(group, number)}, both at "
            f"{call.location}; the tensors of a collective must have the same size on every rank"
        )
    return _never_entered(owner, group, number, everyone, by_location=call.matches(theirs))


def _parting(
    group: str, evidence: int, mine: RankReport, other: RankReport, everyone: list[RankReport]
) -> tuple[int, RankReport, bool]:
    """Find the call, at or before `evidence`, that only one of two ranks made.

    Returns the position of the call, the report of the rank that made the call, and True if the call is proven: without
    this call, the later calls of both ranks agree. If no call is proven, returns the call at `evidence` that is more
    likely wrong.
    """
    a, b = sorted((mine, other), key=lambda report: report.rank)
    number, agreeing = evidence, 0
    owner = max((a, b), key=lambda report: _oddity(report, group, evidence, everyone))
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


def _oddity(report: RankReport, group: str, number: int, everyone: list[RankReport]) -> tuple[bool, int, int]:
    """Return a sort key for the likelihood that a rank's call is wrong.

    A call is more likely wrong if only this rank made it, if user code made it, or if many ranks made a different call.
    """
    call = report.histories[group][number]
    others = [other for other in everyone if other is not report and other.call(group, number) != call]
    unknown = not any(call in other.histories[group].calls for other in others if group in other.histories)
    called_from_outside = bool(report.waits_at(group, number) and report.external_caller)
    return unknown, 2 * call.location.is_external or int(called_from_outside), len(others)


def _never_entered(
    owner: RankReport,
    group: str,
    number: int,
    everyone: list[RankReport],
    lost: list[int] | None = None,
    by_location: bool = False,
) -> str:
    """Describe the ranks that did not enter the call of `owner`. by_location: calls match only at equal locations."""
    call = owner.histories[group][number]
    here: list[int] = []
    late: list[RankReport] = []
    for report in everyone:
        if report.rank not in owner.histories[group].ranks:
            continue
        theirs = report.call(group, number)
        if theirs == call or (theirs and theirs.matches(call) and not by_location):
            here.append(report.rank)
        elif theirs or report.count(group) <= number:
            late.append(report)
    location = str(call.location)
    if waiting := owner.waits_at(group, number):
        did, location = f"waited in for {waiting.seconds:.0f} s", location + _called_at(owner)
    else:
        did = f"called over {owner.idle_seconds:.0f} s ago" if owner.idle_seconds >= SETTLED else "called"
    absent = name_ranks([report.rank for report in late] + (lost or []))
    clauses = [f"{absent} never entered {call}, which {name_ranks(here)} {did} ({location})"]
    clauses += _activities(late, group, number)
    if lost:
        clauses.append(f"{name_ranks(lost)} did not answer")
    return "; ".join([*clauses, _RULE])


def _activities(late: list[RankReport], group: str, number: int) -> list[str]:
    """Describe, in at most three phrases, the locations of ranks that should be in a call."""
    found: dict[str, list[int]] = {}
    for report in late:
        found.setdefault(_activity(report, group, number), []).append(report.rank)
    return [f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {text}" for text, ranks in found.items()][:3]


def _activity(report: RankReport, group: str, number: int) -> str:
    if report.waiting and (call := report.call(report.waiting.group, report.waiting.number)):
        return f"in {call} ({call.location}{_called_at(report)})"
    call = report.call(group, number)
    return f"in {call} ({call.location})" if call else f"at {report.location}{_called_at(report)}"


def _called_at(report: RankReport) -> str:
    return f", called at {report.external_caller}" if report.external_caller else ""


def name_ranks(ranks: list[int]) -> str:
    """Format a list of ranks, such as `ranks 0, 1 and 2`. Long lists are shortened."""
    shown = [str(rank) for rank in sorted(ranks)]
    if len(shown) > 8:
        shown = [*shown[:7], f"{len(shown) - 7} others"]
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
