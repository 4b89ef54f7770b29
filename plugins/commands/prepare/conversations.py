"""Convert conversations from every published layout to one canonical form."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from crosstrain.utils import paths

from .chat_template import ChatError, refuse_if
from .io import Row, parsed

KEYS = yaml.safe_load((paths.home() / "configs" / "conversation_keys.yaml").read_text(encoding="utf-8"))
_SYSTEM = ("system", "developer")  # roles of a system message
_PLACEHOLDERS = re.compile("|".join(map(re.escape, KEYS["placeholders"])))
_ROLES = ", ".join(sorted(set(KEYS["roles"].values())))


class Turn(BaseModel):
    """A turn in OpenAI's format.

    `content` may be null only in a turn with tool calls. A turn of weight 0 is not trained on. Keys that belong to no
    known layout are kept, because a template may read them.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    weight: Literal[0, 1] | None = None


_OF_TOOLS = set(Turn.model_fields)  # keys that are read in a turn of role "tool"
_OF_OTHERS = _OF_TOOLS - {"name", "tool_call_id"}


class Conversation(BaseModel):
    """A conversation: its turns, the tools that the assistant may call, and whether the last answer is good."""

    messages: list[Turn]
    tools: list[dict[str, Any]]
    is_good: bool


def conversations(
    row: Row, ranked: bool = False, images: list[Row] | None = None
) -> tuple[list[Conversation], set[str]]:
    """Convert a row to the canonical form, and return its conversations and the paths of its unread keys.

    ranked: the row has a chosen and a rejected last answer, or a last answer with a label. images: the image parts of
    turns are appended to this list; the text has a placeholder for each image, and rows without a conversation are
    allowed. Raises ChatError if the layout of the row is unknown or contradictory, or if the row has other media.
    """
    reader = _RowReader(row, images)
    if images is not None and not reader.has_turns:
        return [], reader.unread | reader.rest.keys()
    answers = reader.answers() if ranked else {True: None}
    asked = reader.turns(before_answers=None not in answers.values())
    system = reader.side(reader.rest.pop("system", None) or [], "system")
    made = []
    for is_good, answer in answers.items():
        turns = asked if answer is None else reader.answered(asked, reader.side(answer, "assistant"))
        plain = {"messages": _with_system(turns, system), "tools": reader.one_list_of_tools(), "is_good": is_good}
        try:
            made.append(Conversation.model_validate(plain))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ChatError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    parting = next((turns for turns in zip(*(one.messages for one in made), strict=False) if turns[0] != turns[-1]), ())
    refuse_if(any(turn.role != "assistant" for turn in parting), "the prompts of chosen and rejected differ")
    return made, reader.unread | reader.rest.keys()


class _RowReader:
    """Reads a row column by column. rest: columns not read so far. unread: paths of other keys that are not read."""

    def __init__(self, row: Row, images: list[Row] | None) -> None:
        self.unread, self.images = set[str](), images
        columns = self._decoded(row, "")
        if "preferred_output" in columns:  # OpenAI's preference format: messages and tools are under `input`
            columns |= columns.pop("input", {})
        self.rest = _renamed(columns, KEYS["columns"])
        self._refuse_media(self.rest)
        self.tools = [self.rest.pop("tools", [])]  # tools in the row's column, then the tools of each turn

    @property
    def has_turns(self) -> bool:
        """Whether the row has the columns of a conversation."""
        return "messages" in self.rest or any(self.rest.keys() >= set(pair) for pair in KEYS["pairs"])

    def answers(self) -> dict[bool, Any]:
        """Remove and return the answers: True (good) or False (bad) -> answer; None: the last turn is the answer."""
        for _, column in KEYS["pairs"]:
            match self.rest.get(column):
                case [str(good), str(bad)]:
                    self.rest |= {"chosen": good, "rejected": bad}
                    del self.rest[column]
        if "chosen" in self.rest and "rejected" in self.rest:
            return {True: self.rest.pop("chosen"), False: self.rest.pop("rejected")}
        label = str(self.rest.pop("label", None)).lower()
        refuse_if(
            label not in KEYS["labels"],
            "it has neither chosen and rejected, nor prompt, completion and a label of true, false, 1 or 0",
        )
        return {KEYS["labels"][label]: None}

    def turns(self, before_answers: bool) -> list[Row]:
        """Remove and return the turns; before_answers: only the turns before a separate answer, possibly none."""
        asked = [pair for pair in KEYS["pairs"] if self.rest.get(pair[0])]
        pairs = asked if before_answers else [pair for pair in KEYS["pairs"] if self.rest.keys() >= set(pair)]
        if "messages" in self.rest and not (before_answers and pairs):
            messages = self.rest.pop("messages")
            refuse_if(not isinstance(messages, list) or not messages, "messages is not a list of turns")
            return self.side(messages, "")
        refuse_if(
            not pairs and not before_answers,
            f"it has {', '.join(map(str, self.rest)) or 'no keys'}; expected messages, conversations, prompt and "
            f"completion, question and answer, or instruction and output",
        )
        if not pairs:
            return []
        question, answer = pairs[0]
        text = self.rest.pop(question)
        if question == "instruction":
            text = "\n\n".join(part for part in (text, self.rest.pop("input", "")) if part != "")
        turns = []
        for exchange in self.rest.pop("history", []):
            match exchange:
                case [earlier, reply]:
                    turns += self.side(earlier, "user") + self.side(reply, "assistant")
                case _:
                    turns += self.side([exchange], "")
        turns += self.side(text, "user")
        return turns if before_answers else turns + self.side(self.rest.pop(answer), "assistant")

    def answered(self, asked: list[Row], answer: list[Row]) -> list[Row]:
        """Append an answer to the preceding turns, unless the answer is a whole conversation with these turns."""
        refuse_if(
            not answer or answer[-1]["role"] != "assistant",
            "the last turn of chosen or rejected is not an assistant turn",
        )
        if answer[0]["role"] == "assistant":
            refuse_if(
                not asked or asked[-1]["role"] == "assistant", "it has no prompt, or its prompt ends with an answer"
            )
            return asked + answer
        before, own = ([turn for turn in turns if turn["role"] not in _SYSTEM] for turns in (asked, answer))
        if before != own[: len(before)]:
            self.unread.add("the prompt next to complete conversations")
        return _with_system(answer, [turn for turn in asked if turn["role"] in _SYSTEM])

    def side(self, given: Any, role: str) -> list[Row]:
        """Return the canonical turns of a list of turns, a single turn, or a text that `role` wrote."""
        if not isinstance(given, (list, Mapping)):
            given = {"role": role, "content": given}
        return [self._turn(turn) for turn in _listed(given)]

    def _turn(self, given: Any) -> Row:
        refuse_if(
            not isinstance(given, Mapping),
            f"a turn is {type(given).__name__}, not an object with role and content",
        )
        turn: Row = {"content": None, **_renamed(given, KEYS["turn"])}
        said = str(turn.get("role")).lower()
        refuse_if(
            said not in KEYS["roles"],
            f"a turn has the role {turn.get('role')!r}; known: {_ROLES}",
        )
        turn["role"] = KEYS["roles"][said]
        self._refuse_media(turn)
        self.tools.append(turn.pop("tools", []))
        calls = [*_listed(turn.pop("tool_calls", [])), *_listed(turn.pop("function_call", []))]
        if said in KEYS["callers"]:
            calls += _listed(self._decoded(turn["content"], "function_call", is_json=True))
            turn["content"] = None
        if isinstance(turn["content"], list):
            turn["content"] = "".join(map(self._text, turn["content"]))
        refuse_if(
            not isinstance(turn["content"], str) and (turn["content"] is not None or not calls),
            f"a turn of the {turn['role']} has no text",
        )
        if calls:
            turn["tool_calls"] = [self._call(call) for call in calls]
        turn |= _weight(turn)
        used = _OF_TOOLS if turn["role"] == "tool" else _OF_OTHERS
        self.unread |= {f"messages.{key}" for key in turn.keys() - used}
        self.unread.update(_PLACEHOLDERS.findall(turn["content"] or ""))
        return turn

    def _refuse_media(self, given: Row) -> None:
        reads = (
            "this dataset reads only text; other datasets read images"
            if self.images is None
            else "only text and images are read, and images only from the row and from parts"
        )
        for key in filter(given.get, KEYS["media"]):
            raise ChatError(f"it has {key}, but {reads}")

    def _text(self, part: Any) -> str:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        known = ["text"] if self.images is None else ["text", *KEYS["images"]]
        refuse_if(kind not in known, f"a turn has a part of type {kind}, not {' or '.join(known)}")
        if self.images is not None and kind in KEYS["images"]:
            self.images.append(part)
            return str(KEYS["images"][kind])
        self.unread |= {f"messages.content.{key}" for key in part.keys() - {"type", "text"}}
        refuse_if(not isinstance(part.get("text", ""), str), "a turn has a part whose text is not text")
        return str(part.get("text", ""))

    def _call(self, call: Any) -> Row:
        """Return a tool call in OpenAI's format; `call` is in this format, or only its `function` part."""
        function = _renamed(call.get("function", call), {"parameters": "arguments"})
        name, arguments = function.get("name"), function.get("arguments", {})
        refuse_if(
            not isinstance(name, str) or not isinstance(arguments, Mapping),
            f"a call of {name!r} has no name, or its arguments are not a JSON object",
        )
        outside = call.keys() - {"function"} if "function" in call else set()
        unread = (outside | function.keys() - {"name", "arguments"}) - {"type", "id"}
        self.unread |= {f"messages.tool_calls.{key}" for key in unread}
        return {"type": "function", "function": {"name": name, "arguments": arguments}} | {
            key: call[key] for key in call.keys() & {"id"}
        }

    def one_list_of_tools(self) -> list[Any]:
        """Return the row's tools in OpenAI's format. Raises ChatError if the row has two different lists of tools."""
        lists = [[_tool(tool) for tool in _listed(tools)] for tools in self.tools if tools]
        refuse_if(any(tools != lists[0] for tools in lists), "it has two different lists of tools")
        return lists[0] if lists else []

    def _decoded(self, value: Any, key: str, is_json: bool = False, inside: bool = False) -> Any:
        """Decode JSON strings, and remove null values: a table has nulls for keys that only other rows have.

        is_json: strings are JSON. inside: the keys are data, such as the arguments of a call, not part of a layout.
        """
        if is_json and isinstance(value, str):
            try:
                value = parsed((value.strip() or "{}").encode())
            except ValueError:
                raise ChatError(f"{key} is not JSON") from None
        if isinstance(value, list):
            return [self._decoded(inner, key, is_json, inside) for inner in value]
        if not isinstance(value, Mapping):
            return value
        inside = inside or key in KEYS["schemas"]
        if inside and None in value.values():
            self.unread.add("nulls")
        texts = () if inside else KEYS["json"].get(key, ())
        return {
            name: self._decoded(inner, name, name in texts, inside)
            for name, inner in value.items()
            if inner is not None
        }


def _with_system(turns: list[Row], system: list[Row]) -> list[Row]:
    """Prepend the system turn of a separate column. Raises ChatError if a system turn in `turns` differs."""
    said = [turn["content"] for turn in turns if turn["role"] in _SYSTEM]
    refuse_if(
        said and any(turn["content"] not in said for turn in system),
        "its system column differs from its system turn; keep only one of them",
    )
    return turns if said else system + turns


def _weight(turn: Row) -> Row:
    """Remove the keys that select a turn for training, and return its weight. Raises ChatError if keys disagree."""
    said = {key: turn.pop(key) for key in KEYS["learned"] if key in turn}
    refuse_if(not all(value in (0, 1) for value in said.values()), f"a turn has {said}; expected 0, 1, false or true")
    weights = {int(value == KEYS["learned"][key]) for key, value in said.items()}
    refuse_if(len(weights) > 1, f"a turn has {said}, which contradict each other")
    return {"weight": min(weights)} if weights else {}


def _renamed(given: Mapping[str, Any], names: dict[str, str]) -> Row:
    """Rename keys to the canonical form, unless the row already has the new key. names: old key -> new key."""
    made = dict(given)
    for old, new in names.items():
        if old in made and new not in made:
            made[new] = made.pop(old)
    return made


def _tool(tool: Row) -> Row:
    """Return a tool in OpenAI's format; a bare function becomes a tool of type "function"."""
    if "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, Mapping) else given
