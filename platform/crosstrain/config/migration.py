"""Projects made of other programs' configurations, by the lists of keys and the templates in configs/foreign_keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from crosstrain.config import sources
from crosstrain.config.ahead import AheadChecker
from crosstrain.config.foreign_files import UNKNOWN, read_foreign
from crosstrain.config.foreign_keys import NONE, UNNEEDED, Origin, origins
from crosstrain.config.load import preset_component
from crosstrain.config.run_options import DEFAULT_RUNNER, EXCLUSIVE, RunOptions
from crosstrain.config.schema import Checker, Key, nearest
from crosstrain.config.yaml_text import parse
from crosstrain.utils.errors import ConfigError, explained
from crosstrain.utils.optional_deps import require

_TO_GIVE, _LOST, _NO_NEED = "to be given", "not carried over", "not needed here"
_NEEDED = ("output_dir",), ("max_iters", "max_epoch"), ("micro_batch_size", "global_batch_size", "accum_grad_iters")
_MANY = 4  # settings of one program
_OURS = ("model", "datasets", "runner")  # sections whose options have names of other programs
_UNHEARD = f"{NONE}not known, and nothing here is called so"

Count = Callable[..., int | None]


class _Tree(dict[str, Any]):
    """A mapping that keeps account of its values and of those that are read, with some of them changed."""

    def __init__(self, tree: dict[Any, Any], changes: dict[Key, Any], at: Key, account: dict[Key, list[Any]]) -> None:
        off = False in (tree.get("enabled"), tree.get("enable"))  # and says nothing
        self._at, self._account = at, {} if off else account
        for name, value in tree.items():
            key = (*at, str(name))
            if isinstance(value, dict):
                self[key[-1]] = _Tree(value, changes, key, self._account)
            else:
                self._account[key], self[key[-1]] = [value, False], changes.get(key, value)

    def __getitem__(self, name: str) -> Any:
        self._account.get((*self._at, name), [None, False])[1] = True
        value = super().__getitem__(name)
        return UNKNOWN if isinstance(value, str) and "${" in value else value  # which means nothing here


@cache
def _templates(folder: Path) -> Any:
    jinja2 = require("jinja2", "crosstrain migrate")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.ChainableUndefined, trim_blocks=True,
        lstrip_blocks=True, extensions=["jinja2.ext.do"],
        finalize=lambda value: json.dumps(value, default=lambda _: None),  # JSON is YAML; null where nothing is said
    )  # fmt: skip


def looks_like(path: Path) -> Origin | None:
    """Return the program whose settings a file has, by several that are none of a project here; None for no program."""

    def names(tree: dict[str, Any]) -> set[str]:
        inner = [value for key, value in tree.items() if isinstance(value, dict) and key not in _OURS]
        return set(map(str, tree)).union(*map(names, inner))

    found = dict[int, Origin]()
    for origin in origins().values():
        with suppress(ConfigError):
            tree = read_foreign(path, origin.calls)
            if "calls" in tree and path.suffix == ".py":  # functions of this program
                return origin
            unknown = names(tree) - {f.name for f in fields(RunOptions)}
            found[len(unknown & origin.answers.maps[0].keys())] = origin
    return found[max(found)] if max(found, default=0) >= _MANY else None


def migrate(path: Path, origin: Origin, count: Count = lambda *files: None) -> tuple[str, list[str], int | None]:
    """Return the configuration at `path` as a project file, notes of what it lacks, and the ranks that it is for.

    Every setting is in the project or in a note. `count` returns the ids of a tokenizer's files, None if it cannot.
    Raises ConfigError for a configuration that cannot be read.
    """
    template = _templates(origin.file.parent).get_template(f"{origin.file.stem}.jinja")
    tree = read_foreign(path, origin.calls)
    unread: dict[str, str] = tree.pop(UNKNOWN, {})

    def located(name: Any, there: Callable[[Path], bool] = Path.is_file) -> str | None:
        """Find a file that the configuration names, beside it or in the working directory."""
        return next((str(file) for file in (path.parent / str(name), Path(str(name))) if there(file)), None)

    def vocabulary(*names: Any) -> int | None:
        found = [located(name, Path.exists) if name else None for name in names]
        return None if None in found else count(*found)

    def rendered(changes: dict[Key, Any]) -> tuple[tuple[str, list[str]], _Tree]:
        """Return the template's text and notes, and the settings that it was given."""
        notes, old = list[str](), _Tree(tree, changes, (), {})

        def beside(name: Any, counted: bool = True) -> _Tree:
            """Read a file that the configuration names; nothing where it is not there."""
            found = read_foreign(Path(file)) if (file := located(name)) else {}
            return _Tree(found, changes, (str(name),), old._account if counted else {})

        text = template.render(
            old=old, located=located, folder=partial(located, there=Path.is_dir), beside=beside,
            vocabulary=vocabulary, need=f"{UNKNOWN} {{}}".format,
            gap=lambda *what: notes.append(": ".join((_LOST, *what))),
            unneeded=lambda *what: notes.append(": ".join((_NO_NEED, *what))),
        )  # fmt: skip
        return (text, notes), old

    with explained(f"{path}: a value in it cannot be understood"):
        made, old = rendered({})
        project = _settled(parse(made[0])[0], (), notes := list(made[1]))
    settings = {part.lower() for key in old._account for part in key}
    for each in origins().values():  # the settings that only one of the two programs has say whose they are
        theirs, ours = (settings & program.answers.maps[0].keys() for program in (each, origin))
        if len(theirs - ours) > 2 and not ours - theirs:
            raise ConfigError(f"{path}: these are settings of {each.name}: give --from {each.file.stem}")
    ranks = project.pop("ranks", None)
    said = {word for note in made[1] for word in note.split(": ")[1].split(", ")}
    shared = {f.name: f"run.{f.name}" for f in fields(RunOptions)}  # other programs' keys of the same name
    rivals = [pair for a, b, _ in EXCLUSIVE for pair in ((a, b), (b, a))]
    for key, (value, read) in old._account.items():
        name, near = key[-1].lower(), range(len(key), 0, -1)
        end = next((n for n in near if key[n - 1].lower() in origin.answers), len(key))  # the setting, or its section
        answer = origin.answers.get(key[end - 1].lower(), shared.get(name, _UNHEARD))
        kind, _, reason = answer.partition(": ")
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        neutral = origin.neutral.get(name)
        quiet = neutral if isinstance(neutral, list) else [neutral]
        if one in (None, "", "auto", "none", [], {}, *quiet) or (value is False and reason):
            continue  # it says nothing, or what would not be done here either
        parts = [next(iter(project["datasets"])) if part == "NAME" else part for part in kind.split(".")]
        there = reduce(lambda tree, part: tree.get(part) if isinstance(tree, dict) else None, parts, project)
        partly = any(seen and other[:end] == key[:end] for other, (_, seen) in old._account.items())
        here = str(there.get("name") if isinstance(there, dict) else there)
        if (value is True or here in str(value).lower()) and here in re.findall(r"\w+", reason.lower()):
            continue  # the project has what the answer says
        title = {NONE: _LOST, UNNEEDED: _NO_NEED}.get(f"{kind}: ")
        why = reason if title else f"give {'.'.join(parts)}{f' ({reason})' if reason else ''}"
        if not reason and there is not None:
            why = f"the project has {'.'.join(parts)}={here}"
        elif answer is _UNHEARD and (meant := nearest(name, [*origin.answers, *shared], 0.8)):
            why += f"; did you mean {meant[0]}?"
        note = f"{title or _LOST}: {'.'.join(key if partly else key[:end])}: {why}"
        if read:
            if end < len(key) or answer is _UNHEARD or not value or there == value or said & {".".join(key), *key}:
                continue
            with suppress(require("jinja2", "crosstrain migrate").TemplateError, TypeError, ValueError):
                other = f"?{value}" if isinstance(value, str) else value is not True and value + value
                if rendered({key: other})[0] == made:  # the template makes nothing of it
                    notes.append(note)
        elif rival := next((b for a, b in rivals if kind == f"run.{a}" and b in project["run"]), None):
            notes.append(f"{_NO_NEED}: {'.'.join(key)}: run.{rival} says it")
        elif reason or end < len(key) or there not in (None, value):
            notes.append(note)
        else:
            if kind.startswith("run.runner.") and (runner := _runner_without(parts[-1], project["run"])):
                notes.append(f"{_NO_NEED}: {'.'.join(key)}: run.runner is {runner}, which has no {parts[-1]}")
                continue
            carried = _settled(reduce(lambda inner, part: {part: inner}, reversed(parts), value), (), notes)
            project = sources.merge(carried, project, names_replace=False)
    for entry in project["datasets"].values():
        for option in entry.keys() - {"name", "parts"} if "parts" in entry else ():
            value = entry.pop(option)  # an option of every part
            entry["parts"] = [part | {"dataset": {option: value} | part["dataset"]} for part in entry["parts"]]
    project["run"] = run = {name: project["run"][name] for name in shared if name in project["run"]}  # the docs' order
    for name in [name for name, value in run.items() if _has_zero(value)]:
        try:
            Checker(".".join).value(get_type_hints(RunOptions, include_extras=True)[name], run[name], ("run", name))
        except ConfigError as error:
            for wrong in error.sentences:  # in other programs such a number mostly means off
                if found := re.match(r"([\w.]+): expected .*, got (-.+|0(\.0)?)$", wrong):
                    notes.append(f"{_LOST}: {wrong}; it is left out")
                    *section, last = found[1].split(".")
                    del reduce(getitem, section, project)[last]
    for name, *others in _NEEDED:
        if run.keys().isdisjoint((name, *others)):
            run[name] = _settled(UNKNOWN, ("run", name), notes)
    notes += [f"{_LOST}: {name}: {why}" for name, why in unread.items()]
    together = dict[tuple[str, str], dict[str, None]]()
    for title, names, why in (note.split(": ", 2) for note in notes):
        together.setdefault((title, why), {})[names] = None
    notes = [f"{title}: {', '.join(names)}: {why}" for (title, why), names in together.items()]
    notes.sort(key=lambda note: (_NO_NEED, _LOST, _TO_GIVE).index(note.partition(": ")[0]))
    sections = ({name: project[name]} for name in ("model", "datasets", "run"))
    dumped = (yaml.safe_dump(s, sort_keys=False, default_flow_style=None, width=110) for s in sections)
    return "\n".join(["".join(f"# {note}\n" for note in notes), *dumped]), notes, ranks


def _runner_without(option: str, run: dict[str, Any]) -> str | None:
    """Return the name of the runner of `run` if it has no such option."""
    given = run.get("runner", DEFAULT_RUNNER)
    name = given.get("name", DEFAULT_RUNNER) if isinstance(given, dict) else given
    known = fields(AheadChecker(".".join).options_class("runner", preset_component("runner", name)))
    return None if option in {f.name for f in known} else name


def _has_zero(value: Any) -> bool:
    """Tell whether a number of `value` is 0 or less."""
    if isinstance(value, dict):
        return any(map(_has_zero, value.values()))
    return type(value) in (int, float) and value <= 0


def _settled(value: Any, key: Key, notes: list[str]) -> Any:
    """Leave out what a template left empty, and note what has yet to be given."""
    if isinstance(value, dict):
        each = {name: _settled(inner, (*key, name), notes) for name, inner in value.items()}
        return {name: inner for name, inner in each.items() if inner not in (None, {})}
    if isinstance(value, list):
        return [_settled(item, (*key, str(i)), notes) for i, item in enumerate(value)]
    if not isinstance(value, str) or not value.startswith(UNKNOWN):
        return value
    why = value.removeprefix(UNKNOWN).strip() or "the file does not say it"
    notes.append(f"{_TO_GIVE}: {'.'.join(key)}: {why}")
    return UNKNOWN
