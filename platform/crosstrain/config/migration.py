"""Projects made of other programs' configurations, by the lists of keys and the templates in configs/foreign_keys."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from crosstrain.config import sources
from crosstrain.config.foreign_files import UNKNOWN, read_foreign
from crosstrain.config.foreign_keys import NONE, UNNEEDED, Origin
from crosstrain.config.run_options import RunOptions
from crosstrain.config.schema import Key
from crosstrain.config.yaml_text import parse
from crosstrain.utils.errors import explained
from crosstrain.utils.optional_deps import require

_TO_GIVE, _LOST, _NO_NEED = "to be given", "not carried over", "not needed here"


class _Tree(dict[str, Any]):
    """A mapping that keeps account of the values that a template has not read, with some of them changed."""

    def __init__(self, tree: dict[Any, Any], unread: dict[Key, Any], changes: dict[Key, Any], at: Key = ()) -> None:
        self._unread, self._at = unread, at
        for name, value in tree.items():
            key = (*at, str(name))
            self[key[-1]] = value = _Tree(value, unread, changes, key) if isinstance(value, dict) else value
            if not isinstance(value, dict):
                self[key[-1]] = unread[key] = changes.get(key, value)

    def __getitem__(self, name: str) -> Any:
        self._unread.pop((*self._at, name), None)
        value = super().__getitem__(name)
        return UNKNOWN if isinstance(value, str) and "${" in value else value  # which means nothing here


def migrate(path: Path, origin: Origin) -> tuple[str, list[str], int | None]:
    """Return the configuration at `path` as a project file, notes of what it lacks, and the ranks that it is for.

    Every setting is in the project or in a note. Raises ConfigError for a configuration that cannot be read.
    """
    tree = read_foreign(path)
    jinja2 = require("jinja2", "crosstrain migrate")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(origin.file.parent), undefined=jinja2.ChainableUndefined, trim_blocks=True,
        lstrip_blocks=True, extensions=["jinja2.ext.do"],
        finalize=lambda value: json.dumps(value, default=lambda _: None),  # JSON is YAML; null where nothing is said
    )  # fmt: skip

    def beside(name: Any) -> _Tree:
        """Read a file that the configuration names; nothing where it is not there."""
        file = path.parent / str(name)
        return _Tree(read_foreign(file) if file.is_file() else {}, {}, {})

    def rendered(old: _Tree) -> tuple[str, list[str]]:
        """Return the template's text and notes."""
        notes = list[str]()
        functions = {
            "need": f"{UNKNOWN} {{}}".format,
            "gap": lambda *what: notes.append(_note(_LOST, *what)),
            "unneeded": lambda *what: notes.append(_note(_NO_NEED, *what)),
        }
        template = environment.get_template(f"{origin.file.stem}.jinja")
        return template.render(old=old, beside=beside, **functions), notes

    unread = dict[Key, Any]()
    old = _Tree(tree, unread, {})
    settings = dict(unread)
    with explained(f"{path}: a value in it cannot be understood"):
        text, notes = made = rendered(old)
        project = _settled(parse(text)[0], (), notes := list(notes))
    ranks = project.pop("ranks", None)
    said = {word for note in made[1] for word in note.split(": ")[1].split(", ")}
    shared = {f.name: f"run.{f.name}" for f in fields(RunOptions)}  # other programs' keys of the same name
    for key, value in settings.items():
        name = key[-1].lower()
        answer = origin.answers.get(name, shared.get(name))
        if value in (None, "", [], {}, origin.neutral.get(name)) or (value is False and ": " in (answer or ": ")):
            continue  # it says nothing, or what would not be done here either
        kind, _, reason = (answer or f"{NONE}not known, and nothing here is called so").partition(": ")
        parts = [next(iter(project["datasets"])) if part == "NAME" else part for part in kind.split(".")]
        there = reduce(lambda tree, part: tree.get(part) if isinstance(tree, dict) else None, parts, project)
        if key not in unread:
            if not answer or not value or said & {".".join(key), *key}:
                continue
            with suppress(jinja2.TemplateError, TypeError, ValueError):
                other = f"?{value}" if isinstance(value, str) else value is not True and value + value
                if rendered(_Tree(tree, {}, {key: other})) == made:  # the template makes nothing of it
                    notes.append(_lost(key, ".".join(parts), reason))
        elif reason or there not in (None, value):
            notes.append(_lost(key, ".".join(parts), reason))
        else:
            carried = _settled(reduce(lambda inner, part: {part: inner}, reversed(parts), value), (), notes)
            project = sources.merge(carried, project, names_replace=False)
    project["run"] = {name: project["run"][name] for name in shared if name in project["run"]}  # in the docs' order
    notes.sort(key=lambda note: (note.startswith(_TO_GIVE), note.startswith(_LOST)))
    sections = ({name: project[name]} for name in ("model", "datasets", "run"))
    dumped = (yaml.safe_dump(s, sort_keys=False, default_flow_style=None, width=110) for s in sections)
    return "\n".join(["".join(f"# {note}\n" for note in notes), *dumped]), notes, ranks


def _lost(key: Key, kind: str, reason: str) -> str:
    """Return the note of a setting whose answer is `kind: reason`."""
    title = {NONE: _LOST, UNNEEDED: _NO_NEED}.get(f"{kind}: ")
    here = f"give {kind} ({reason})" if reason else f"give {kind}"
    return _note(title or _LOST, ".".join(key), reason if title else here)


def _note(title: str, key: str, what: str) -> str:
    return f"{title}: {key}: {what}"


def _settled(value: Any, key: Key, notes: list[str]) -> Any:
    """Leave out what a template left empty, and note what has yet to be given."""
    if isinstance(value, dict):
        each = {name: _settled(inner, (*key, name), notes) for name, inner in value.items()}
        return {name: inner for name, inner in each.items() if inner not in (None, {})}
    if isinstance(value, list):
        return [_settled(item, (*key, str(i)), notes) for i, item in enumerate(value)]
    if not isinstance(value, str) or not value.startswith(UNKNOWN):
        return value
    notes.append(_note(_TO_GIVE, ".".join(key), value.removeprefix(UNKNOWN).strip() or "the file does not say it"))
    return UNKNOWN
