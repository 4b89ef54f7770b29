"""The collectives of one step on every rank, and if they match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, zip_longest
from typing import Any

from crosstrain import ConfigError
from crosstrain.distributed.watchdog import flight_recorder
from crosstrain.distributed.watchdog.diagnosis import find_absent, find_desync, name_ranks
from crosstrain.distributed.watchdog.flight_recorder import History, RankReport
from crosstrain.utils.errors import explained
from crosstrain.utils.units import show_bytes

from .estimate import UNKNOWN_SHAPE, Project
from .follow import Program, follow

_WINDOW = 64  # calls around a difference, among which its cause is sought


@dataclass
class Collectives:
    """The calls of every rank. mismatches: sentences with lines of code and ranks; none if all calls can meet."""

    programs: list[Program]
    mismatches: list[str]

    @staticmethod
    def of(project: Project, world_size: int) -> Collectives:
        """Follow a step of every rank. Raises ConfigError where the runner cannot do without values or ranks."""
        if project.inputs is None:
            raise ConfigError(f"--collectives: {UNKNOWN_SHAPE}")
        with explained("--collectives: a step under this runner cannot be followed without ranks and values"):
            programs = follow(project, world_size)
        return Collectives(programs, list(dict.fromkeys(_mismatches(programs))))

    def as_json(self) -> dict[str, Any]:
        """Calls and bytes sent by kind and group, for each program and the ranks that run it."""
        programs = [{"ranks": program.ranks, "calls": _table(program)} for program in self.programs]
        return {"programs": programs, "mismatches": self.mismatches}

    def lines(self) -> list[str]:
        """A table of the rank that sends most, and the verdict."""
        most = max(self.programs, key=lambda program: sum(call.sent for call in program.calls))
        rows = [(r["kind"], f"{r['group']} of {r['size']}", r["calls"], r["sent"]) for r in _table(most)]
        rows.append(("total", "", len(most.calls), sum(call.sent for call in most.calls)))
        out = [f"{f'calls of rank {most.ranks[0]} in a step':<30}{'group':<22}{'calls':>10}{'sent':>14}"]
        out += [f"  {kind:<28}{group:<22}{calls:>10,}{show_bytes(sent):>14}" for kind, group, calls, sent in rows]
        out += ["", "ranks that run the same code"]
        out += [f"  {len(p.ranks):>6,}  {name_ranks(p.ranks)}" for p in self.programs]
        match = f"calls match on all ranks ({sum(len(p.ranks) for p in self.programs):,})"
        return [*out, "", *([f"mismatch: {text}" for text in self.mismatches] or [match])]


def _table(program: Program) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for call in program.calls:
        empty = {"kind": call.kind, "group": call.group, "size": call.ranks, "calls": 0, "sent": 0}
        row = rows.setdefault((call.kind, call.group), empty)
        row["calls"] += 1
        row["sent"] += call.sent
    return list(rows.values())


def _mismatches(programs: list[Program]) -> Iterator[str]:
    run, families = {rank: program for program in programs for rank in program.ranks}, programs[0].families
    for program in programs:
        if program.families != families:
            yield f"{name_ranks(program.ranks)} make other process groups than {name_ranks(programs[0].ranks)}"
            return
    groups, judged = [(family, members) for family, each in families.items() for members in each], set[Any]()

    def judge(group: str, calls: dict[int, list[flight_recorder.Call]]) -> Iterator[str]:
        lists = tuple(map(id, calls.values()))
        if len(set(lists)) > 1 and lists not in judged:
            judged.add(lists)  # other groups of the same programs would say the same
            yield from _difference(group, calls, {rank: run[rank] for rank in calls})

    for family, members in groups:
        yield from judge(family, {rank: run[rank].on(family) for rank in members})
        for own, rank in enumerate(members):
            for peer in run[rank].peers(family):
                for (here, sender), (there, receiver) in permutations(((own, rank), (peer, members[peer]))):
                    sent, received = run[sender].on(family, "send", there), run[receiver].on(family, "recv", here)
                    yield from judge(f"{family}, from rank {sender}", {sender: sent, receiver: received})
        usual, *others = sorted(dict.fromkeys(run[rank] for rank in members), key=lambda program: -len(program.ranks))
        for odd in others:
            if odd not in judged and (usual, odd) not in judged:
                judged.add((usual, odd))
                if text := _order(usual, odd):
                    judged.add(odd)
                    yield text


def _difference(group: str, calls: dict[int, list[flight_recorder.Call]], run: dict[int, Program]) -> Iterator[str]:
    """The watchdog's sentence on ranks that have made these calls on one group."""
    first, *others = calls.values()
    pairs = [zip_longest(first, other) for other in others]
    differ = [next((n for n, (a, b) in enumerate(pair) if not (a and b and a.matches(b))), None) for pair in pairs]
    if (at := min((n for n in differ if n is not None), default=None)) is None:
        return
    near = slice(max(0, at - _WINDOW), at + _WINDOW)
    reports = [
        RankReport(rank, 0, run[rank].end, None, 0.0, False, None,
                   {group: History([*calls], near.start, made[near])}) for rank, made in calls.items()
    ]  # fmt: skip
    reports.sort(key=lambda report: -report.count(group))
    text = find_desync(reports[0], reports[1:], failed=True) or find_absent(reports[0], reports[1:], [])
    yield f"{group}, call {at + 1}: {text}"


def _order(usual: Program, odd: Program) -> str | None:
    """Compare the order of calls on different groups, as far as two ranks make the same calls on each."""
    a, b = ([call for call in p.calls if call.kind not in ("send", "recv")] for p in (usual, odd))
    same = {f for f in usual.families if [c for c in a if c.group == f] == [c for c in b if c.group == f]}
    for theirs, mine in zip((c for c in a if c.group in same), (c for c in b if c.group in same), strict=True):
        if theirs != mine:
            return (f"order of groups: on {name_ranks(odd.ranks)} {mine} on {mine.group} comes before {theirs} on "
                    f"{theirs.group}, on {name_ranks(usual.ranks)} after it")  # fmt: skip
    return None
