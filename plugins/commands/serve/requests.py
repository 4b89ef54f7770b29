"""OpenAI's request schemas. Unknown parameters are refused, never ignored."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, from_json

from .api_error import ApiError, wrong

_FAR = 2**31 - 1
_UNSUPPORTED = PydanticCustomError("unsupported", "is not supported by this server; leave it out")
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Many = Field(max_length=64)
_Likeliest = Annotated[int, Field(ge=0, le=20)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    # Unsupported parameter -> values that are accepted in addition to null, because they have no effect.
    neutral: ClassVar[dict[str, list[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = dict(given)
        for name, neutral in cls.neutral.items():
            value = given.pop(name, None)
            if value is not None and not any(
                value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral
            ):
                raise ValidationError.from_exception_data(
                    cls.__name__, [InitErrorDetails(type=_UNSUPPORTED, loc=(name,), input=value)]
                )
        return given


class StreamOptions(_Strict):
    neutral = {"include_obfuscation": [False]}

    include_usage: bool | None = None


class TextRequest(_Strict):
    """Parameters that completions and chats share."""

    neutral = {"frequency_penalty": [0], "presence_penalty": [0], "logit_bias": [{}]}

    model: str | None = None  # name of the served model
    max_tokens: int | None = Field(None, ge=0, le=_FAR)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=_FAR)  # not in OpenAI's API
    n: int | None = Field(None, ge=1, le=_FAR)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # has no effect

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(TextRequest):
    """POST /v1/completions"""

    neutral = TextRequest.neutral | {"best_of": [1], "suffix": [""]}

    prompt: str | Annotated[list[str], _Many] | list[int] | Annotated[list[list[int]], _Many]
    echo: bool | None = None
    logprobs: _Likeliest | None = None

    @property
    def prompts(self) -> list[Any]:
        many = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return self.prompt if many else [self.prompt]  # type: ignore[return-value]


class ImageUrl(_Strict):
    neutral = {"detail": ["auto"]}

    url: str


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(_Strict):
    neutral = {
        "name": [], "refusal": [], "audio": [], "annotations": [[]], "function_call": [], "tool_calls": [[]],
    }  # fmt: skip

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ChatRequest(TextRequest):
    """POST /v1/chat/completions"""

    neutral = TextRequest.neutral | {
        "response_format": [{"type": "text"}],
        "tools": [[]],
        "tool_choice": ["none", "auto"],
        "parallel_tool_calls": [True, False],
        "functions": [[]],
        "function_call": ["none", "auto"],
        "modalities": [["text"]],
        "audio": [],
        "prediction": [],
        "reasoning_effort": ["none"],
        "verbosity": ["medium"],
        "web_search_options": [],
        "moderation": [],
        "service_tier": ["auto", "default"],
        "store": [False],
        "metadata": [{}],
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_tokens: int | None = Field(None, ge=1, le=_FAR)
    max_completion_tokens: int | None = Field(None, ge=1, le=_FAR)
    logprobs: bool | None = None
    top_logprobs: _Likeliest | None = None
    # Labels set by the client; they have no effect.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


Request = TypeVar("Request", CompletionRequest, ChatRequest)


def parse(body: bytearray, kind: type[Request]) -> Request:
    """Parse and check a request's body. Raises ApiError 400 with the name of the wrong parameter."""
    try:
        document = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        request = kind.model_validate(document)
    except ValidationError as error:
        raise _api_error(error, document) from None
    if request.stream_options is not None and not request.stream:
        raise wrong("stream_options", "is allowed only with stream")
    return request


def _api_error(error: ValidationError, document: dict[str, Any]) -> ApiError:
    # A value may partly match several alternatives. Prefer errors that are not type errors, then the most nested.
    found = [(_steps(e["loc"], document), e) for e in error.errors(include_url=False, include_input=False)]
    steps, worst = max(found, key=lambda pair: (not pair[1]["type"].endswith("_type"), len(pair[0])))
    param = "".join(f"[{s}]" if isinstance(s, int) else f".{s[:64]}" for s in steps).removeprefix(".")
    known = {
        "extra_forbidden": ("is not a parameter", "unknown_parameter"), "missing": ("is required", "invalid_value"),
        "unsupported": (worst["msg"], "unsupported_parameter"),
    }  # fmt: skip
    message, code = known.get(worst["type"], (worst["msg"], "invalid_value"))
    return wrong(param, message[:1].lower() + message[1:], code)


def _steps(where: Sequence[str | int], document: Any) -> list[str | int]:
    """Return the keys and indices of an error location, without the names that pydantic adds for union members."""
    steps: list[str | int] = []
    for number, part in enumerate(where):
        in_list = isinstance(document, list) and isinstance(part, int) and part < len(document)
        if in_list or (isinstance(document, dict) and part in document):
            document = document[part]
        elif not (isinstance(document, dict) and number == len(where) - 1):  # a missing key is kept
            continue
        steps.append(part)
    return steps
