"""A YAML parser for configurations, with limits on size and depth, and with conventional number formats.

`1e-4` is a number, as in OmegaConf. `010`, `1:30` and dates are text; YAML 1.1 reads them as 8, 90 and dates. `yes`
and `on` are true; `no` and `off` are false. Only the YAML tags of null, booleans, numbers, text, lists and mappings
are allowed.
"""

import re
from typing import Any

import yaml

LARGEST_TREE = 10_000  # values; every 100 characters of a text count as one more value
DEEPEST = 50


class Unreadable(Exception):
    """A text that is not valid YAML or exceeds the limits. line: line number, counted from 1; None: unknown."""

    def __init__(self, message: str, mark: yaml.Mark | None = None) -> None:
        super().__init__(message)
        self.line = mark.line + 1 if mark else None


class _Loader(yaml.SafeLoader):
    composed = 0  # number of values so far

    def fetch_key(self) -> None:
        if self.peek(1) not in _BLANK:  # in a flow mapping, PyYAML reads {?x: 1} as {x: 1}
            raise yaml.MarkedYAMLError(
                problem="text that begins with ? needs quotes inside braces", problem_mark=self.get_mark()
            )
        super().fetch_key()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.composed += 1  # check the limit here: reading the rest could take a long time
        if self.composed > LARGEST_TREE:
            raise Unreadable(f"more than {LARGEST_TREE:,} values", self.get_mark())
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (KeyError, ValueError) as error:  # caused by an explicit tag, or by too many digits for Python
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"{str(node.value)[:40]!r} is not a valid {kind}", problem_mark=node.start_mark
            ) from error
        if isinstance(value, int) and value.bit_length() > 1000:
            raise yaml.MarkedYAMLError(problem="a number of more than 300 digits", problem_mark=node.start_mark)
        return value


_BLANK = "\0 \t\r\n\x85\u2028\u2029"
_ADVICE = {  # part of PyYAML's message -> advice
    r"'\t'": "indent with spaces",
    "alias": "text that begins with * needs quotes",
    "alphabetic or numeric": "text that begins with * or & needs quotes",
    "cannot start any token": "text that begins with this character needs quotes",
    "mapping values": "text that contains ': ' needs quotes",
}
_TAG = "tag:yaml.org,2002:"
_Loader.yaml_constructors = {
    tag: yaml.SafeLoader.yaml_constructors[tag]
    for tag in (None, *(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map")))
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag in (f"{_TAG}null", f"{_TAG}bool", f"{_TAG}merge")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INT = r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$"
_FLOAT = r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?)$"
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(_INT), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(_FLOAT), list("-+.0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(r"[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"), list("-+."))


def parse(text: str) -> tuple[Any, yaml.Node | None]:
    """Parse a YAML document. Returns its value and root node; both are None for an empty text. Raises Unreadable."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None, None
        _measure(root, {})
        return loader.construct_document(root), root
    except yaml.MarkedYAMLError as error:
        problem = error.problem or ""
        problem += next((f"; {advice}" for part, advice in _ADVICE.items() if part in problem), "")
        raise Unreadable(f"not valid YAML: {problem}", error.problem_mark or error.context_mark) from error
    except yaml.YAMLError as error:  # a character that YAML forbids
        raise Unreadable(f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise Unreadable("nested too deeply") from error


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Count the values and levels of a node with its aliases expanded. Raises an error for duplicate keys."""
    if id(node) in known:
        if (found := known[id(node)]) is None:
            raise Unreadable("an anchor contains itself")
        return found
    known[id(node)] = None
    children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"found duplicate key {key.value}", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
    size, depth = 1 + (len(node.value) // 100 if isinstance(node, yaml.ScalarNode) else 0), 1
    for child in children:
        more, levels = _measure(child, known)
        size, depth = size + more, max(depth, levels + 1)
        if size > LARGEST_TREE or depth > DEEPEST:
            what = f"more than {LARGEST_TREE:,} values" if size > LARGEST_TREE else f"more than {DEEPEST} levels"
            raise Unreadable(f"{what} after expanding aliases", node.start_mark)
    known[id(node)] = size, depth
    return size, depth
