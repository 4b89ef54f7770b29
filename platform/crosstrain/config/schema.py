"""Validate plain data against typed dataclasses: return typed values, or raise errors, one sentence per mistake."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from crosstrain.config import bounds
from crosstrain.config.hints import hint_of_key
from crosstrain.config.registry import registry
from crosstrain.utils.errors import ConfigError, ConfigErrors, UserError, nearest, sentence

Key = tuple[str, ...]  # ("run", "runner", "name") is run.runner.name


class OptionError(ConfigError):
    """An error to raise in an options dataclass's `__post_init__`. The checker adds the file and line of `key`."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


class _OutOfBounds(ConfigError):
    """A value that has the right type but is out of bounds."""


@contextmanager
def all_mistakes() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Raise the UserErrors of the block at its end: a single error unchanged, several as ConfigErrors.

    Yields a function that returns a context manager, which collects the error of a part of the block.
    """
    mistakes: list[UserError] = []

    @contextmanager
    def collected() -> Iterator[None]:
        try:
            yield
        except UserError as error:
            mistakes.append(error)

    with collected():
        yield collected
    if mistakes:
        raise mistakes[0] if len(mistakes) == 1 else ConfigErrors(mistakes)


@dataclass
class NoOptions:
    """Options of a component that has no class `Options`.

    Any options dataclass may have these class variables. `elsewhere` maps keys of other programs to advice. `former`
    maps removed options to their defaults; old files may still contain these values, which are ignored. `shorthand` is
    the field that a plain value sets, as in `amp: bf16`. `published` lists model options for which a
    `pretrained` folder takes precedence over presets.
    """


@dataclass(frozen=True)
class Component:
    """The name of a registered component, and an instance of its `Options` (None in the default of a field).

    An options dataclass may have components as fields: `resize: Annotated[Component, "processor"]`.
    """

    name: str
    options: Any = None


def options_class(kind: str, component: Any) -> type:
    """Return the options dataclass of a registered class or function; NoOptions if it has no `Options`."""
    cls = getattr(component, "Options", NoOptions)
    reserved = {"arch", "model_type", "adapter"} if kind == "model" else {"name"}
    whose = f"Options of {component.__module__}.{component.__qualname__}"
    if not is_dataclass(cls) or not isinstance(cls, type):
        raise ConfigError(f"{whose} must be a dataclass")
    if taken := reserved & {f.name for f in fields(cls)}:
        raise ConfigError(f"{whose} must not have a field called {min(taken)}")
    try:
        get_type_hints(cls)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{whose}: a field's type is not defined at the top level of its module: {error}") from error
    return cls


def defaults(cls: type) -> dict[str, Any]:
    """Return a dataclass's defaults as plain values. Fields without a default are left out."""
    made = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}
    return {name: to_plain(value) for name, value in made.items() if value is not MISSING}


def to_plain(value: Any) -> Any:
    """Convert dataclasses, components, tuples and paths to YAML and JSON values. `Checker` does the reverse."""
    match value:
        case Component(name=name, options=options):
            return {"name": name, **(to_plain(options) or {})}
        case Mapping():
            return {key: to_plain(item) for key, item in value.items()}
        case list() | tuple():
            return [to_plain(item) for item in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    return str(value) if isinstance(value, Path) else value


class Checker:
    """Checks values against types.

    Types: bool, int, float, str, None, Any, object (unchecked), Path, Literal, unions, list, tuple, dict, dataclasses,
    `Annotated[Component, kind]` and the constraints of crosstrain.config.bounds. An int is accepted for a float;
    nothing else is converted. `where(key)` returns the file, line and name of a key for error messages.
    `over_preset(kind, given)` returns a component's options with a preset applied. Every method raises ConfigError, or
    ConfigErrors for several mistakes at once.
    """

    def __init__(
        self,
        where: Callable[[Key], str],
        over_preset: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda kind, given: given,
    ) -> None:
        self.where, self.over_preset = where, over_preset

    def fail(self, key: Key, message: str) -> NoReturn:
        raise ConfigError(self.sentence(key, message))

    def sentence(self, key: Key, message: str) -> str:
        return sentence(f"{self.where(key)}: {message}")

    @contextmanager
    def located(self, key: Key) -> Iterator[None]:
        """Prefix errors that are raised in the block with the location of `key`."""
        try:
            yield
        except UserError as error:
            raise type(error)(self.sentence(key, str(error))) from error

    def component(self, kind: str, value: Any, key: Key) -> Component:
        """Check a component, given as a name or as a mapping with `name` and options."""
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            self.fail(key, f"expected {describe(Annotated[Component, kind])}, got {_show(value)}")
        if "name" not in value:
            self.name_required(kind, (*key, "name"))
        given = {**value, "name": self.value(str, value["name"], (*key, "name"))}
        with self.located((*key, "name")):
            value = self.over_preset(kind, given)
            cls = options_class(kind, registry.get(kind, name := value["name"]))
        return Component(name, self.dataclass(cls, {k: v for k, v in value.items() if k != "name"}, key))

    def dataclass(self, cls: Any, value: Any, key: Key) -> Any:
        """Make an instance of `cls` from a mapping of its fields."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            self.fail(key, _expected(cls, value))
        hints = get_type_hints(cls, include_extras=True)
        known = [f.name for f in fields(cls) if f.init]
        former, elsewhere = getattr(cls, "former", {}), getattr(cls, "elsewhere", {})
        arguments, plain, meant = {}, defaults(cls), set[str]()
        with all_mistakes() as collected:
            for name in [name for name in value if name not in known]:
                if name in former and value[name] == former[name]:
                    continue
                with collected():
                    if name in elsewhere:
                        self.fail((*key, str(name)), f"not an option here: {elsewhere[name].removeprefix('none: ')}")
                    meant.update(nearest_key(str(name), known))
                    self.unknown_key((*key, str(name)), known)
            for name in known:
                with collected():
                    if name in value:
                        arguments[name] = self.value(hints[name], value[name], (*key, name))
                    elif name not in meant | plain.keys():
                        self.fail((*key, name), f"required, but missing; expected {describe(hints[name])}")
                    elif name in plain and (get_args(hints[name])[:1] == (Component,) or is_dataclass(hints[name])):
                        arguments[name] = self.value(hints[name], plain[name], (*key, name))  # check nested components
        try:
            return cls(**arguments)
        except OptionError as error:
            self.fail((*key, error.key), error.message)
        except (ConfigError, ValueError) as error:
            self.fail(key, str(error))

    def name_required(self, kind: str, key: Key, presets: Iterable[str] = ()) -> NoReturn:
        known = ", ".join([*registry.names(kind), *presets]) or "none"
        self.fail(key, f"the {kind}'s name is required; known: {known}")

    def unknown_key(self, key: Key, known: Iterable[str]) -> NoReturn:
        names, own = list(known), key[-1].lstrip("-").replace("-", "_")
        near = [name for name in names if own in (name, name[:-1], f"{name}s")]
        if not near and (foreign := hint_of_key(own)):
            place = foreign.rpartition(" ")[2].split(".")
            if (place[0], place[-1], len(place)) == (key[0], own, len(key)):
                self.fail(key, f"unknown key; other components have it, this one has only: {', '.join(names)}")
            if place[-1] in names and len(place) != len(key):  # a similar option in a different section
                self.fail(key, f"unknown key; did you mean {'.'.join((*key[:-1], place[-1]))}?")
            self.fail(key, f"unknown key; {foreign}")
        programs = registry.instances("hints").values()
        foreign_keys = {foreign for each in programs for foreign in each.known() if len(foreign) > 4}
        near = near or nearest(own, [*names, *foreign_keys], 0.75 if len(own) <= 4 else 0.85) or nearest_key(own, names)
        if near and near[0] in names:
            self.fail(key, f"unknown key; did you mean {'.'.join((*key[:-1], near[0]))}?")
        if near and (foreign := hint_of_key(near[0]) or "").endswith(f".{own}"):
            self.fail(key, f"unknown key; other components have it, this one has only: {', '.join(names)}")
        if near:
            self.fail(key, f"unknown key; did you mean {near[0]}? {foreign}")
        self.fail(key, "unknown key; " + (f"known: {', '.join(names)}" if names else "there are no options here"))

    def value(self, hint: Any, value: Any, key: Key) -> Any:
        """Check `value` against the type `hint` and its bounds."""
        inner, *constraints = get_args(hint) if get_origin(hint) is Annotated else [hint]
        if inner is Component:
            return self.component(constraints[0], value, key)
        if inner in (Any, object):
            return self._anything(value, key) if inner is Any else value
        checked = self._typed(inner, value, key)
        if words := bounds.violated(checked, constraints):
            expected, got = f"{describe(hint)}{words[0]}", f"{_show(value)}{words[1]}"
            raise _OutOfBounds(self.sentence(key, f"expected {expected}, got {got}"))
        return checked

    def _typed(self, hint: Any, value: Any, key: Key) -> Any:
        """Check `value` against the type `hint`, but not its bounds."""
        origin, arguments = get_origin(hint) or hint, get_args(hint)
        if origin in (Union, types.UnionType):
            return self._union(hint, value, key)
        if is_dataclass(origin):
            return self.dataclass(origin, value, key)
        if origin is dict and isinstance(value, Mapping):
            name_type, item_type = arguments or (Any, Any)
            return self._mapping(name_type, item_type, value, key)
        if origin in (list, tuple) and isinstance(value, (list, tuple)):
            return self._sequence(origin, arguments, value, key, hint)
        if origin is Literal and any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        if origin is float and type(value) in (int, float):
            with suppress(OverflowError):  # the int exceeds the largest float
                return float(value)
        if origin is Path and isinstance(value, (str, Path)):
            return Path(self.value(bounds.FilePath, str(value) if value != Path() else ".", key))
        if origin in (bool, int, str, type(None)) and type(value) is origin:
            return value
        self.fail(key, _expected(hint, value))

    def _anything(self, value: Any, key: Key) -> Any:
        """Check that YAML can represent `value`. Infinite numbers are allowed, because some libraries use them."""
        if type(value) not in (bool, int, float, str, type(None), list, dict):
            self.fail(key, f"expected a number, text, true, false, null, a list or a mapping, got {_show(value)}")
        return self.value(Annotated[type(value), bounds.AllowInfinity()], value, key)

    def _mapping(self, name_type: Any, item_type: Any, value: Mapping[Any, Any], key: Key) -> dict[Any, Any]:
        checked = {}
        with all_mistakes() as collected:
            for name, item in value.items():
                at = (*key, str(name))
                with collected():
                    checked[self.value(name_type, name, at)] = self.value(item_type, item, at)
        return checked

    def _sequence(self, origin: type, arguments: tuple[Any, ...], value: Any, key: Key, hint: Any) -> Any:
        exact = origin is tuple and arguments and arguments[-1] is not Ellipsis
        hints = arguments if exact else [arguments[0] if arguments else Any] * len(value)
        if len(value) != len(hints):
            self.fail(key, f"expected {describe(hint)}, got {len(value)} values")
        checked = []
        with all_mistakes() as collected:
            for i, (item_type, item) in enumerate(zip(hints, value, strict=True)):
                with collected():
                    checked.append(self.value(item_type, item, (*key, str(i))))
        return origin(checked)

    def _union(self, hint: Any, value: Any, key: Key) -> Any:
        members = get_args(hint)
        structured = [m for m in members if _takes(m, value)]
        if isinstance(value, str) and get_args(members[0])[:1] == (Component,) and members[1:] == (type(None),):
            structured = [members[0]]
        if len(structured) == 1:  # checking only this type gives a more precise error
            return self.value(structured[0], value, key)
        for member in members:
            try:
                return self.value(member, value, key)
            except _OutOfBounds:
                raise
            except ConfigError:
                continue
        self.fail(key, _expected(hint, value))


def _takes(hint: Any, value: Any) -> bool:
    """Return True if `hint` and `value` are the same kind of container."""
    origin = get_origin(hint) or hint
    if origin is Annotated:
        return _takes(get_args(hint)[0], value)
    if isinstance(value, Mapping):
        return origin is dict or is_dataclass(origin)
    return isinstance(value, (list, tuple)) and origin in (list, tuple)


def nearest_key(name: str, known: Iterable[str]) -> list[str]:
    """Return a list with the known key that `name` misspells, or an empty list. Longer names must match better."""
    return nearest(name, known, 0.6 if len(name) <= 4 else 0.75)


def _expected(hint: Any, value: Any) -> str:
    literals = [member for member in (hint, *get_args(hint)) if get_origin(member) is Literal]
    choices = [choice for member in literals for choice in get_args(member) if isinstance(choice, str)]
    text = value if isinstance(value, str) else ""
    near = nearest(text, choices)
    if not near and text.lower() == "none" and type(None) in get_args(hint):
        near = ["null"]
    return f"expected {describe(hint)}, got {_show(value)}" + (f"; did you mean {near[0]}?" if near else "")


_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null", Path: "a path",
    list: "a list", dict: "a mapping", Any: "anything", object: "anything",
}  # fmt: skip


def describe(hint: Any, limits: bool = False) -> str:
    """Describe a type in words. With `limits`, add the bounds of its values."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated and arguments[0] is Component:
        return f"the {arguments[1]}'s name, or a mapping with its name and options"
    if limits and bounds.IsPath() in arguments:
        return "a path"
    if origin is Annotated:
        return describe(arguments[0], limits) + (bounds.in_words(arguments[1:]) if limits else "")
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a, limits) for a in arguments)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)} values ({', '.join(describe(a, limits) for a in arguments)})"
    if origin in (list, tuple) and arguments:
        return f"a list of {describe(arguments[0], limits)}"
    if head := getattr(origin, "shorthand", None):
        return f"{describe(get_type_hints(origin)[head])}, or a mapping"
    return "a mapping" if is_dataclass(origin) else _WORDS.get(origin, str(hint))


def _show(value: Any) -> str:
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case Mapping():
            return f"a mapping with {', '.join(map(str, list(value)[:3]))}" if value else "an empty mapping"
        case list() | tuple():
            return f"a list of {len(value)} values"
        case str():
            return f"the text {value!r}" if len(value) <= 200 else f"the text {value[:80]!r}..."
    return repr(value) if not isinstance(value, int) or abs(value) < 10**100 else "a number of more than 100 digits"
