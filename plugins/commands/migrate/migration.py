"""Make projects from configurations of other programs, using the key lists and templates in configs/foreign_keys."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache, reduce
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from crosstrain import ConfigError, DataError, RunOptions, explained, printable, require
from crosstrain.config import sources
from crosstrain.config.load import preset_component
from crosstrain.config.run_options import DEFAULT_RUNNER, EXCLUSIVE
from crosstrain.config.schema import Checker, Key, nearest
from crosstrain.config.yaml_text import parse
from crosstrain.utils import paths

from .foreign_files import UNKNOWN, read_foreign
from .foreign_keys import NONE, UNNEEDED, Origin, origins

_NO_NEED, _CARRIED, _LOST, _TO_GIVE = _TITLES = "not needed here", "carried over", "not carried over", "to be given"
_NEEDED = ("output_dir",), ("max_iters", "max_epoch"), ("micro_batch_size", "global_batch_size", "accum_grad_iters")
_RIVALS = [pair for a, b, _ in EXCLUSIVE for pair in ((a, b), (b, a))]  # pairs of mutually exclusive keys of `run`
_MOST = 2000  # maximum number of settings in a file; published files have fewer than 700
_SECTIONS = {"model", "datasets", "runner"}  # project sections that use option names of other programs
UNHEARD = "unknown, and no key here has this name"
# Answers for keys that are also project keys, in the order of the documentation.
_OWN = {f.name: f"run.{f.name}" for f in fields(RunOptions)} | {
    "plugins": f"{NONE}a migrated file cannot load code; name plugins that you trust in the project"
}

Note = tuple[str, str, str]  # title, names of settings or of project keys, reason


class _Tree(dict[str, Any]):
    """A mapping that records its values, and whether each value was read; `changes` replaces some values."""

    def __init__(self, tree: dict[Any, Any], changes: dict[Key, Any], at: Key, account: dict[Key, list[Any]]) -> None:
        # The settings of a disabled section are not recorded.
        self._at, self._account = at, {} if False in (tree.get("enabled"), tree.get("enable")) else account
        for name, value in tree.items():
            key = (*at, str(name))
            if _acts(key[-1]):  # templates also read names, such as paths with weights
                self._account[key] = [value, False]
            elif isinstance(value, dict):
                self[key[-1]] = _Tree(value, changes, key, self._account)
            else:
                self._account[key] = [value, False]
                self[key[-1]] = UNKNOWN if _acts(value) else changes.get(key, value)

    def __getitem__(self, name: str) -> Any:
        self._account.get((*self._at, name), [None, False])[1] = True
        return super().__getitem__(name)


def _acts(value: Any) -> bool:
    """Return True for a value with text that a project would resolve (${...}) or execute (pipe:COMMAND)."""
    return bool(re.search(r"\$\{|\bpipe:", json.dumps(value, default=str), re.IGNORECASE))


@cache
def _template(origin: Path) -> Any:
    """Return the template next to the key list `origin`."""
    jinja2 = require("jinja2", "crosstrain migrate")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(origin.parent),
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
        finalize=lambda value: json.dumps(value, default=lambda _: None),  # JSON is valid YAML; undefined becomes null
    ).get_template(f"{origin.stem}.jinja")


def looks_like(path: Path) -> Origin | None:
    """Return the program that a file's settings belong to, or None.

    The file must call functions of the program, or have at least four of the program's settings that are not project
    keys.
    """
    found = dict[int, Origin]()
    for origin in origins().values():
        with suppress(ConfigError):
            tree = read_foreign(path, origin.calls)
            if "calls" in tree and path.suffix == ".py":  # the file calls functions of this program
                return origin
            _Tree(tree, {}, (), account := dict[Key, list[Any]]())
            names = {part for key in account if _SECTIONS.isdisjoint(key[:-1]) for part in key} - _OWN.keys()
            found[len(names & origin.answers.maps[0].keys())] = origin
    return found[max(found)] if max(found, default=0) >= 4 else None


def migrate(path: Path, origin: Origin) -> tuple[str, list[str], int | None]:
    """Convert the configuration at `path`. Return the project file, notes, and the number of ranks (None: unknown).

    Every setting is in the project or in a note. Raises ConfigError if the configuration cannot be read.
    """
    migration = _Migration(path, origin)
    project = migration.settled()
    ranks = project.pop("ranks", 0)
    project["run"] = run = {name: project["run"][name] for name in _OWN if name in project["run"]}
    _leave_out_zeros(project, migration.notes)
    for name, *others in _NEEDED:
        if run.keys().isdisjoint((name, *others)):
            run[name] = _without_gaps(UNKNOWN, ("run", name), migration.notes)
    notes = _lines(migration.notes)
    dumped = (
        yaml.safe_dump({name: project[name]}, sort_keys=False, default_flow_style=None, width=110)
        for name in ("model", "datasets", "run")
    )
    # A template writes the text "null" for a null that must stay in the project.
    text = "\n".join(["".join(f"# {note}\n" for note in notes), *dumped]).replace(": 'null'", ": null")
    return text, notes, int(ranks) if ranks in range(1, 10**6) else None


class _Migration:
    """Settings of a foreign program, the project that its template makes from them, and notes on other settings."""

    def __init__(self, path: Path, origin: Origin) -> None:
        self._path, self._origin = path, origin
        self._tree = read_foreign(path, origin.calls)
        unread = self._tree.pop(UNKNOWN, {})
        with explained(f"{path}: a value cannot be interpreted"):
            self._made, self._account = self._rendered({})
            self.notes = [*self._made[1], *((_LOST, name, why) for name, why in unread.items())]
            self._project = _without_gaps(parse(self._made[0])[0], (), self.notes)

    def _rendered(self, changes: dict[Key, Any]) -> tuple[tuple[str, list[Note]], dict[Key, list[Any]]]:
        """Return (text, notes) and a dict from each setting to [value, whether the template used it]."""
        notes, account = list[Note](), dict[Key, list[Any]]()

        def beside(name: Any, counted: bool = True) -> _Tree:
            """Read a file that the configuration names; a missing file counts as empty."""
            found = read_foreign(Path(file)) if (file := self._located(name)) else {}
            return _Tree(found, changes, (str(name),), account if counted else {})

        text = _template(self._origin.file).render(
            old=_Tree(self._tree, changes, (), account),
            beside=beside,
            located=self._located,
            folder=lambda name: self._located(name, Path.is_dir),
            vocabulary=self._vocabulary,
            need=f"{UNKNOWN} {{}}".format,
            gap=lambda names, why: notes.append((_LOST, str(names), str(why))),
            unneeded=lambda names, why: notes.append((_NO_NEED, str(names), str(why))),
        )
        return (text, notes), account

    def _located(self, name: Any, there: Callable[[Path], bool] = Path.is_file) -> str | None:
        """Find a file that the configuration names, in the configuration's folder or the working directory."""
        return next(
            (str(file) for file in (self._path.parent / str(name), Path(str(name))) if name and there(file)), None
        )

    def _vocabulary(self, *names: Any) -> int | None:
        """Return the vocabulary size of a tokenizer, or of GPT-2's vocabulary and merges files; None if unreadable."""
        from crosstrain import load_tokenizer
        from crosstrain.data.tokenizer import load_gpt2

        files = [file for name in names if name and (file := self._located(name, Path.exists))]
        with suppress(DataError):
            if len(files) == len(names):
                return (load_gpt2(*files) if len(files) > 1 else load_tokenizer(*files)).vocab_size
        return None

    def settled(self) -> Any:
        """Return the project; every setting is in it or in a note.

        Raises ConfigError if the settings belong to a different program, or if there are too many settings.
        """
        if len(self._account) > _MOST:
            raise ConfigError(f"{self._path}: expected at most {_MOST} settings, got {len(self._account)}")
        settings = {part.lower() for key in self._account for part in key}
        for each in origins().values():  # recognize a different program by settings that only that program has
            theirs, ours = (settings & program.answers.maps[0].keys() for program in (each, self._origin))
            if len(theirs - ours) > 2 and not ours - theirs:
                raise ConfigError(f"{self._path}: these are settings of {each.name}; use --from {each.file.stem}")
        for key, (value, read) in self._account.items():
            name, near = key[-1].lower(), range(len(key), 0, -1)
            # Number of leading parts of the key up to the innermost part with an answer: the setting or its section.
            end = next((n for n in near if key[n - 1].lower() in self._origin.answers), len(key))
            answer = self._origin.answers.get(key[end - 1].lower(), _OWN.get(name, f"{NONE}{UNHEARD}"))
            one = value[0] if isinstance(value, list) and len(value) == 1 else value
            quiet = None, "", "auto", "none", [], {}, *self._origin.neutral.get(name, [])
            if _acts(value):
                self.notes.append(
                    (_LOST, ".".join(key), "commands and references ${...} are not carried over; set the value")
                )
            elif one not in quiet and (value is not False or ": " not in answer or name in self._origin.neutral):
                self._settle(key, end, value, read, answer)
        return self._project

    def _settle(self, key: Key, end: int, value: Any, read: bool, answer: str) -> None:
        """Put a setting into the project or into a note; `answer` belongs to the first `end` parts of `key`."""
        kind, _, reason = answer.partition(": ")
        parts = [next(iter(self._project["datasets"])) if part == "NAME" else part for part in kind.split(".")]
        there = reduce(lambda tree, part: tree.get(part) if isinstance(tree, dict) else None, parts, self._project)
        here = str(there.get("name") if isinstance(there, dict) else there)
        answered = (value is True or here in str(value).lower()) and here in re.findall(r"\w+", reason.lower())
        said = {word for _, names, _ in self._made[1] for word in names.split(", ")}
        known = end < len(key) or reason == UNHEARD or not value or there == value or said & {".".join(key), *key}
        if answered or (read and (known or not self._ignores(key, value))):
            return
        title = {NONE: _LOST, UNNEEDED: _NO_NEED}.get(f"{kind}: ")
        why = reason if title else f"set {'.'.join(parts)}{f' ({reason})' if reason else ''}"
        if not reason and there is not None:
            why = f"the project has {'.'.join(parts)}={here}"
        elif reason == UNHEARD and len(self._account) < 300:
            meant = nearest(key[-1].lower(), [*self._origin.answers, *_OWN], 0.8)
            why += f"; did you mean {meant[0]}?" if meant else ""
        rival = next((b for a, b in _RIVALS if kind == f"run.{a}" and b in self._project["run"]), None)
        if rival and not read:
            self.notes.append((_NO_NEED, ".".join(key), f"run.{rival} already sets it"))
        elif read or reason or end < len(key) or there not in (None, value):
            partly = any(seen and other[:end] == key[:end] for other, (_, seen) in self._account.items())
            self.notes.append((title or _LOST, ".".join(key if partly else key[:end]), why))
        else:
            self._carry(key, parts, value)

    def _ignores(self, key: Key, value: Any) -> bool:
        """Return True if the template gives the same result for a changed value."""
        with suppress(require("jinja2", "crosstrain migrate").TemplateError, TypeError, ValueError):
            changes = {key: f"?{value}" if isinstance(value, str) else value is not True and value + value}
            return bool(self._rendered(changes)[0] == self._made)
        return False

    def _carry(self, key: Key, parts: list[str], value: Any) -> None:
        """Put a value under a key of the project, or into a note if the project's runner has no such option."""
        runner = sources.named(self._project, ("run", "runner")) or DEFAULT_RUNNER
        if parts[:2] == ["run", "runner"] and parts[-1] not in ["runner", *_options_of(runner)]:
            self.notes.append((_NO_NEED, ".".join(key), f"run.runner is {runner}, which has no {parts[-1]}"))
        else:
            if key[-1].lower() not in self._origin.answers:
                self.notes.append((_CARRIED, ".".join(key), f"{self._origin.name} has no such setting; check it"))
            carried = _without_gaps(sources.nested(parts, value), (), self.notes)
            self._project = sources.merge(carried, self._project, names_replace=False)


@cache
def _options_of(runner: str) -> list[str]:
    """Return the names of the options of a built-in runner or preset, without importing it."""
    schema = json.loads((paths.home() / "projects" / "crosstrain.schema.json").read_text(encoding="utf-8"))
    return list(schema["definitions"][f"runner.{preset_component('runner', runner)}"]["properties"])


def _leave_out_zeros(project: dict[str, Any], notes: list[Note]) -> None:
    """Leave out zero and negative numbers that `run` does not accept; in other programs, they usually mean "off"."""
    not_positive = re.compile(r"(?<![\w.])(-\d|0(\.0)?(?![\d.]))")  # a number that is not positive, in JSON
    for name in [name for name, value in project["run"].items() if not_positive.search(json.dumps(value))]:
        try:
            Checker(".".join).value(
                get_type_hints(RunOptions, include_extras=True)[name], project["run"][name], ("run", name)
            )
        except ConfigError as error:
            for wrong in error.sentences:
                if found := re.match(r"(run(?:\.[a-z]\w*)+): (expected .*, got (?:-.+|0(?:\.0)?))$", wrong):
                    notes.append((_LOST, found[1], f"{found[2]}; it is left out"))
                    *section, last = found[1].split(".")
                    del reduce(lambda tree, part: tree[part], section, project)[last]


def _lines(notes: list[Note]) -> list[str]:
    """Return notes as lines in the order of their titles; names with the same reason share a line."""
    together = dict[tuple[str, str], dict[str, None]]()
    for title, names, why in sorted(notes, key=lambda note: _TITLES.index(note[0])):
        together.setdefault((title, why), {})[names] = None
    return [  # `split` removes the line breaks that a name may contain
        printable(" ".join(f"{title}: {', '.join(names)}: {why}".split())) for (title, why), names in together.items()
    ]


def _without_gaps(value: Any, key: Key, notes: list[Note]) -> Any:
    """Remove the values that a template left empty, and add notes for the values that the user must give."""
    match value:
        case dict():
            return {
                name: left
                for name, inner in value.items()
                if (left := _without_gaps(inner, (*key, name), notes)) not in (None, {})
            }
        case list():
            return [_without_gaps(item, (*key, str(i)), notes) for i, item in enumerate(value)]
        case str() if value.startswith(UNKNOWN):
            notes.append((_TO_GIVE, ".".join(key), value.removeprefix(UNKNOWN).strip() or "the file does not set it"))
            return UNKNOWN
    return value
