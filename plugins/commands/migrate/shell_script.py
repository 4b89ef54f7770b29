"""Read the options that a shell script's training command would receive. Nothing is executed."""

import re
from collections import ChainMap
from contextlib import suppress
from itertools import pairwise, takewhile, zip_longest
from typing import Any

from crosstrain import require
from crosstrain.config.yaml_text import Unreadable, parse

from .literals import UNKNOWN, value_of

_MOST = 2**21  # limit on the total number of characters, with variables expanded
_GAP, _QUOTED = "\x1e", "\x1f"  # separator of fields and array elements; mark that keeps empty quoted fields
_FIRST, _DOUBT = 0xF0000, re.compile("[\U000f0000-\U0010ffff]")
_OWN = re.compile(f"[{_GAP}{_QUOTED}]|{_DOUBT.pattern}")
_WORD = re.compile(f"[\\s{_GAP}]*[^\\s{_GAP}]+")
_OPTION = re.compile(r"(?:--?|\+{0,2}(?=[\w.]+=))([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_VARIABLE = re.compile(r"\s*\$\{?(\w+|[@*])(?:\[([@*]|\d+)])?(?:(:[-=+?]).*?)?\}?", re.DOTALL)
_FILES, _BRACES = re.compile(r"^~|[*?]"), re.compile(r"(?<!\$)\{[^{}]*(,|\.\.)[^{}]*\}")  # expansions to several words
# Kind of statement -> number of its leading parts that always execute.
_ALL, _LOOP = 10**6, 0
_CERTAIN = {
    "program": _ALL, "compound_statement": _ALL, "redirected_statement": _ALL, "variable_assignments": _ALL,
    "declaration_command": _ALL, "do_group": _ALL, "pipeline": _ALL, "subshell": _ALL,
    "if_statement": 1, "list": 1, "heredoc_redirect": 1, "case_statement": 1, "elif_clause": 1, "else_clause": 1,
    "case_item": 1, "negated_command": 1,
    "for_statement": _LOOP, "while_statement": _LOOP, "c_style_for_statement": _LOOP,
}  # fmt: skip
_SETS = re.compile(rb"unset|\(\(|\w+\s+(-\w*[iAnlu]|[\"'$])")  # statements that set variables in unsupported ways
_JOINED = ("string", "concatenation", "command_name", "arithmetic_expansion")
_SHELLS = {f"{folder}{name}" for folder in ("", "/bin/", "/usr/bin/") for name in ("bash", "sh", "zsh")}
_LAUNCHER = re.compile(r"\b(launch|run|runner)\w*$")  # a module that starts a program
# Options of launchers that are settings.
_SETTINGS = {
    "nproc_per_node", "nnodes", "num_processes", "num_gpus", "num_nodes", "config_file", "mixed_precision",
    "gradient_accumulation_steps", "gradient_clipping", "use_deepspeed", "deepspeed_config_file", "zero_stage",
    "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device", "offload_param_nvme_path",
    "use_fsdp", "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params",
    "fsdp_activation_checkpointing", "dynamo_backend",
}  # fmt: skip


def read_script(text: str) -> dict[str, Any]:
    """Return a dict of the options of a script's training command.

    Names have `_` in place of `-`, and options without a value are true. A value known only at run time is UNKNOWN. The
    key UNKNOWN contains the reason for each UNKNOWN value, and notes on other text that was not read. Raises Unreadable
    if the text is not a script, or is too long after variables are expanded.
    """
    shell = _Shell()
    shell.follow(_OWN.sub("\ufffd", text), sure=True)
    return shell.settings()


class _Shell:
    """Interprets a script without executing it, to find the arguments that its commands would receive.

    A placeholder (a "doubt" in the code) is one Unicode private-use character for text that is known only at run
    time, such as the environment, the script's arguments or the output of commands. `_doubts` contains the reason
    for each placeholder, and the options that it may stand for. After a branch or a loop assigns a variable, the
    variable's value is the leading words that all cases share, followed by a placeholder.
    """

    def __init__(self) -> None:
        library, language = (require(f"tree_sitter{part}", "crosstrain migrate of a script") for part in ("", "_bash"))
        self._parser = library.Parser(library.Language(language.language()))
        self._variables = ChainMap[str, str | None]()  # scopes: called functions first, then the script
        self._functions, self._sure = dict[str, Any](), True
        # For each placeholder: reason, options that it may stand for, whether its first word may be a plain argument.
        self._doubts, self._length = list[tuple[str, set[str], bool]](), 0
        # For each command: priority, program, line, option -> words, reasons why other words belong to no option.
        self._runs = list[tuple[tuple[bool, int], str, int, dict[str, list[str]], list[str]]]()

    def follow(self, text: str, sure: bool) -> None:
        """Interpret a whole script. If the script might not run (`sure` is False), its assignments are uncertain."""
        self._run(self._parser.parse(f"{text}\n".encode()).root_node, sure)

    def _run(self, node: Any, sure: bool) -> None:
        kind, inner, before, self._sure = node.type, node.named_children, self._variables, sure
        match kind:
            case "ERROR":
                raise Unreadable(
                    f"line {node.start_point.row + 1}: {node.text.decode()[:40]!r} is not a bash statement"
                )
            case "variable_assignment":
                self._assign(node, sure)
            case "function_definition":
                self._functions[inner[0].text.decode()] = node.child_by_field_name("body")
            case "command":
                self._command(node, sure)
            case "unset_command" | "compound_statement" | "declaration_command" if _SETS.match(node.text):
                self._forget(node, node.text.decode())
            case _ if kind in _CERTAIN:
                certain = _CERTAIN[kind]
                if kind in ("pipeline", "subshell"):
                    self._variables = ChainMap(*map(dict, before.maps))
                if kind.endswith("for_statement"):
                    values = [field for child in node.children_by_field_name("value") for field in self._fields(child)]
                    self._forget(node, inner[0].text.decode(), *values)
                for i, child in enumerate(inner * 2 if certain == _LOOP else inner):
                    if node.text.startswith((b"local", b"declare", b"typeset")):
                        self._variables.maps[0].setdefault(re.split(r"\W", child.text.decode())[0])
                    self._run(child, sure and i < certain)
                    if certain == _ALL and re.match(rb"(exit|return|break|continue)(\s|$)", child.text):
                        break
        self._variables = before  # restored after a subshell, pipeline or function

    def _command(self, node: Any, sure: bool) -> None:
        parts = [child for child in node.named_children if not child.type.endswith(("_redirect", "_assignment"))]
        name, *rest = fields = [field for part in parts for field in self._fields(part)] or [""]
        match name:
            case "eval" if rest and not _DOUBT.match(rest[0]):
                self.follow("\n" * node.start_point.row + " ".join(rest), sure)
            case "eval" | "source" | ".":
                self._forget(node, " ".join(self._variables))
            case "read" | "mapfile" | "readarray" | "getopts" | "let" | "printf" if name != "printf" or "-v" in rest:
                self._forget(node, " ".join(rest))
            case "shift" | "set" if name == "shift" or "--" in rest:
                self._variables.maps[0].update(
                    dict.fromkeys("@123456789", self._doubt(node, *rest, self._variables.get("@") or ""))
                )
            case _ if name in self._functions:
                body = self._functions[name]
                given = [self._doubt(node, *rest)] * 9 if _DOUBT.search("".join(rest)) else rest[:9]
                self._variables = self._variables.new_child(
                    dict(zip_longest("123456789", given)) | {"@": _GAP.join(rest)}
                )
                self._run(body, sure and b"return" not in body.text)
            case _ if name not in ("echo", "printf"):
                self._record(fields, node.start_point.row + 1)
        for option, text in pairwise(rest):
            if re.fullmatch(r"-\w*c", option) and _SHELLS & {*fields}:  # the text is a script for a new shell
                self._variables = ChainMap()
                self.follow("\n" * node.start_point.row + text, sure=False)

    def _assign(self, node: Any, sure: bool) -> None:
        name, value = node.child_by_field_name("name").text.decode(), node.child_by_field_name("value")
        text = self._text(value, quoted=True).replace(_QUOTED, "") if value else ""
        first, gap, others = (self._variables.get(name) or "").partition(_GAP)
        adds = any(child.type == "+=" for child in node.children)
        if "[" in name:  # `name` is an array element
            self._forget(node, name, text)
        elif value is None or value.type != "array":
            self._set(name, f"{first if adds else ''}{text.replace(_GAP, ' ')}{gap}{others}", node, sure)
        else:
            old = f"{first}{gap}{others}" if adds else ""
            self._set(name, f"{old}{_GAP}{text}" if old and text else f"{old}{text}", node, sure)

    def _set(self, name: str, text: str, node: Any, sure: bool) -> None:
        """Assign to a variable.

        If not `sure`, the value is the leading words that the old and the new value share, and a placeholder.
        """
        old = self._variables.get(name)
        if not sure and text != old:
            both = zip(_WORD.findall(old or ""), _WORD.findall(text), strict=False)
            kept = "".join(word for word, _ in takewhile(lambda pair: pair[0] == pair[1], both))
            rest = self._doubt(node, (old or "")[len(kept) :], text[len(kept) :])
            text = f"{kept}{_GAP if _GAP in f'{old}{text}' else ' '}{rest}" if kept else rest
        next((scope for scope in self._variables.maps if name in scope), self._variables.maps[-1])[name] = text

    def _forget(self, node: Any, names: str, *texts: str) -> None:
        for name in re.findall(r"[A-Za-z_]\w*", names):
            self._set(name, self._doubt(node, *texts), node, sure=False)

    def _doubt(self, node: Any, *texts: str) -> str:
        """Return a new placeholder for one of the texts; without texts, for any text."""
        source = node.text.decode().strip()
        words = [re.split(rf"[\s{_GAP}]+", text.lstrip(f" {_GAP}")) for text in texts]
        options = {_named(found[1]) for each in words for word in each if (found := _OPTION.fullmatch(word))}
        options.update(*(names for _, names, _ in self._within(" ".join(texts))))
        begins = {first for first, *_ in words if first} or {source.strip("${}")}
        why = f"line {node.start_point.row + 1}: {source.splitlines()[0][:40]!r} is known only at run time"
        bare = any(not re.match("--?[A-Za-z]|[@*]", first) for first in begins)
        self._doubts.append((why, options, bare))
        return chr(_FIRST + len(self._doubts) - 1)

    def _within(self, text: str) -> list[tuple[str, set[str], bool]]:
        return [self._doubts[ord(each) - _FIRST] for each in _DOUBT.findall(text)]

    def _unread(self, node: Any) -> str:
        """Return a placeholder for an expansion that is not evaluated.

        The placeholder may stand for the values of the expansion's variables, or for text that the expansion prints.
        """
        source = node.text.decode()
        names = self._variables if "${!" in source else re.findall(r"\w+", source)
        own = " ".join([source, *(self._functions[name].text.decode() for name in names if name in self._functions)])
        self._length += len(own)
        own = own if node.type == "ERROR" or re.search(r"echo|printf|<<|^\s*\$\{", own) else ""
        return self._doubt(
            node, "?", *(self._variables.get(name) or "" for name in names), re.sub(r"[^\w.=-]+", " ", own)
        )

    def _fields(self, node: Any) -> list[str]:
        """Return the fields that a word expands to."""
        return [field.replace(_QUOTED, "") for field in self._text(node, quoted=False).split(_GAP) if field]

    def _text(self, node: Any, quoted: bool) -> str:
        """Return a word with its variables expanded. Outside quotes, `_GAP` separates its fields."""
        kind, source = node.type, node.text.decode()
        self._length += 16 + len(source)  # each word also has a fixed cost
        if self._length + 32 * len(self._doubts) > _MOST:
            raise Unreadable(f"more than {_MOST:,} characters with variables expanded")
        match kind:
            case "comment":
                return ""
            case "raw_string":
                return f"{_QUOTED}{source[1:-1]}"
            case "array":
                return _GAP.join(field for child in node.named_children for field in self._fields(child))
            case "simple_expansion" | "expansion":
                return self._variable(node, quoted)
            case "variable_name" if node.parent.type not in ("concatenation", "expansion"):  # a variable in arithmetic
                return f"({self._variables.get(source) or self._doubt(node)})"
            case "word" | "number" | "string_content" | "variable_name":
                escaped = r'\\(["$`\\\n])' if kind == "string_content" else r"\\([\s\S])"
                split = source if quoted else re.sub(r"(?<!\\)\s+", _GAP, source)
                text = re.sub(escaped, lambda found: found[1].strip("\n"), split)
                return self._doubt(node, text) if not quoted and _FILES.search(source) else text
            case "concatenation" | "brace_expression" if not quoted and _BRACES.search(source):
                return self._doubt(node, source)
            case _ if kind not in _JOINED and not kind.endswith("_expression"):
                return self._unread(node)
        within, end, parts = quoted or kind not in ("concatenation", "command_name"), node.start_byte, list[str]()
        for child in node.named_children:
            # Inside quotes, the parser includes blanks before $ in the expansion.
            blanks = b"".join(re.findall(rb"^\s*(?=[$`])", child.text))
            between = node.text[end - node.start_byte : child.start_byte - node.start_byte] + blanks
            parts += [between.decode().replace("\\\n", ""), self._text(child, within)]
            end = child.end_byte
        joined = "".join(parts) + node.text[end - node.start_byte :].decode()
        if kind == "arithmetic_expansion":
            if re.search(r"(?<![=!<>])=(?!=)|\+\+|--", source):
                self._forget(node, source)
            number = value_of(re.sub(rf"^\s*\$(\(\(|\[)|(\)\)|])$|{_QUOTED}", "", joined).replace("/", "@"), {})
            return str(number) if type(number) is int else self._unread(node)
        if kind == "string":
            return joined[1:-1] if re.fullmatch(r'"\$(@|\{(@|\w+\[@])})"', source) else f"{_QUOTED}{joined[1:-1]}"
        return joined

    def _variable(self, node: Any, quoted: bool) -> str:
        if not (found := _VARIABLE.fullmatch(node.text.decode())):
            return self._unread(node)
        name, index, operator = found.groups(default="")
        value = self._variables.get(name.replace("*", "@"))
        self._length += len(value or "")
        other = "".join(self._text(child, quoted) for child in node.named_children[1:])
        if operator in (":-", ":=") and not value:
            if operator == ":=":
                self._set(name, other.replace(_QUOTED, "").replace(_GAP, " "), node, self._sure)
            return other
        if value is None or (operator and value and not _DOUBT.sub("", value).strip(f" {_GAP}")):
            return self._doubt(node, *filter(None, (value, other)))
        if operator == ":+":
            return other if value else ""
        if not {"*", "@"} & {index, name}:
            elements = value.split(_GAP)
            if (len(elements) > 1 and _DOUBT.search(value)) or int(index or 0) >= len(elements):
                return self._doubt(node, value)
            value = elements[int(index or 0)]
        if not quoted:
            return (
                self._doubt(node, value)
                if _FILES.search(value) or "IFS" in self._variables
                else re.sub(r"\s", _GAP, value)
            )
        if "@" in (index, name):
            return re.sub(f"^(?=.)|(?<={_GAP})", _QUOTED, value, flags=re.DOTALL)
        return value.replace(_GAP, " ")

    def _options(self, fields: list[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Return the words of each option in `fields`, and the reasons why other words belong to no option."""
        options, lost = dict[str, list[str]](), list[str]()
        current, doubt = list[str](), ""  # options that the next word may belong to
        for field in fields:
            doubts = self._within(field)
            only, held = bool(doubts) and not _DOUBT.sub("", field), {name for each in doubts for name in each[1]}
            option = _OPTION.fullmatch(field)
            if option and (field.startswith("-") or not current or options[current[0]]):
                current, doubt = [_named(option[1])], ""
                options[current[0]] = [] if option[2] is None else [option[2]]
                current = current if option[2] is None else []
            elif current and (not only or any(bare for _, _, bare in doubts)):
                for name in current:
                    options[name].append(field + doubt)
            elif not held or any(bare for _, _, bare in doubts):
                lost += [why for why, _, _ in doubts] or [f"{field!r} does not belong to an option"]
            doubt = field if only else doubt
            options |= {name: [field] for name in held}
            current += held
        return options, lost

    def _record(self, fields: list[str], line: int) -> None:
        """Record a command that has options. From the launcher's options, keep only those in _SETTINGS."""
        programs = [
            i
            for i, word in enumerate(fields)
            if word.endswith(".py") or (i and fields[i - 1] == "-m" and not _LAUNCHER.search(word))
        ]
        start = (*programs, 0)[0]
        options, lost = self._options(fields[start + 1 :])
        counts = {name: words for name, words in self._options(fields[:start])[0].items() if name in _SETTINGS}
        if options:
            program = _DOUBT.sub("...", fields[start].rpartition("/")[2])
            self._runs.append(((bool(programs), len(options)), program, line, counts | options, lost))

    def settings(self) -> dict[str, Any]:
        """Return the options of the command with the most options; a Python program takes precedence."""
        if not self._runs:
            return {}
        _, program, first, options, lost = max(self._runs, key=lambda run: run[0])
        doubts = {name: self._within("".join(words)) for name, words in options.items()}
        reasons = {name: within[0][0] for name, within in doubts.items() if within}
        for _, name, line, others, _ in self._runs:
            if name == program:
                why = f"{program} is started with different values in lines {first} and {line}"
                different = (option for option in options | others if options.get(option) != others.get(option))
                reasons = dict.fromkeys(different, why) | reasons
                options = others | options
            else:
                reasons[f"line {line}"] = f"only the command with the most options is read, in line {first}"
        values = {name: UNKNOWN if name in reasons else _parsed(words) for name, words in options.items()}
        reasons |= {"words without an option": "; ".join(lost)} if lost else {}
        return values | ({UNKNOWN: reasons} if reasons else {})


def _named(option: str) -> str:
    return option.replace("-", "_").lower()


def _parsed(words: list[str]) -> Any:
    """Return an option's value: numbers, booleans, JSON and lists are parsed as YAML; everything else is text."""
    values: list[Any] = [word.strip("'\"") for word in words]
    for i, word in enumerate(values):
        with suppress(Unreadable):
            read = parse(word)[0]
            values[i] = read if isinstance(read, (bool, int, float)) or word.startswith(("[", "{")) else word
    return values if len(values) > 1 else values[0] if values else True
