"""OpenAI's request schemas. Unknown parameters are refused, never ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from crosstrain.serving.api_error import ApiError

_FAR = 2**31 - 1


def _only(*values: Any) -> Any:
    """The type of a parameter for which this server takes these values alone, which change nothing."""

    def check(given: Any) -> Any:
        if given is not None and all(given != value or isinstance(given, bool) != isinstance(value, bool)
                                     for value in values):  # fmt: skip
            raise PydanticCustomError("unsupported", "is not supported by this server; leave it out")
        return given

    return Annotated[Any, AfterValidator(check)]


_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Many = Field(max_length=64)
_Likeliest = Annotated[int, Field(ge=0, le=20)]
_NoPenalty = _only(0)
_Nothing = _only()
_Label = str | None  # of the client; nothing depends on it


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: _only(False) = None  # type: ignore[valid-type]


class TextRequest(_Strict):
    """Parameters of both kinds of request."""

    model: str
    max_tokens: int | None = Field(None, ge=0, le=_FAR)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=_FAR)  # not OpenAI's
    n: int | None = Field(None, ge=1, le=_FAR)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: _Label = None
    frequency_penalty: _NoPenalty = None  # type: ignore[valid-type]
    presence_penalty: _NoPenalty = None  # type: ignore[valid-type]
    logit_bias: _only({}) = None  # type: ignore[valid-type]

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(TextRequest):
    """POST /v1/completions"""

    prompt: str | Annotated[list[str], _Many] | list[int] | Annotated[list[list[int]], _Many]
    echo: bool | None = None
    logprobs: _Likeliest | None = None
    best_of: _only(1) = None  # type: ignore[valid-type]
    suffix: _only("") = None  # type: ignore[valid-type]

    @property
    def prompts(self) -> list[Any]:
        many = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return self.prompt if many else [self.prompt]  # type: ignore[return-value]


class ImageUrl(_Strict):
    url: str
    detail: _only("auto") = None  # type: ignore[valid-type]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: _Nothing = None  # type: ignore[valid-type]
    refusal: _Nothing = None  # type: ignore[valid-type]
    audio: _Nothing = None  # type: ignore[valid-type]
    annotations: _only([]) = None  # type: ignore[valid-type]
    function_call: _Nothing = None  # type: ignore[valid-type]
    tool_calls: _only([]) = None  # type: ignore[valid-type]

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ChatRequest(TextRequest):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_tokens: int | None = Field(None, ge=1, le=_FAR)
    max_completion_tokens: int | None = Field(None, ge=1, le=_FAR)
    logprobs: bool | None = None
    top_logprobs: _Likeliest | None = None
    response_format: _only({"type": "text"}) = None  # type: ignore[valid-type]
    tools: _only([]) = None  # type: ignore[valid-type]
    tool_choice: _only("none", "auto") = None  # type: ignore[valid-type]
    parallel_tool_calls: _only(True, False) = None  # type: ignore[valid-type]
    functions: _only([]) = None  # type: ignore[valid-type]
    function_call: _only("none", "auto") = None  # type: ignore[valid-type]
    modalities: _only(["text"]) = None  # type: ignore[valid-type]
    audio: _Nothing = None  # type: ignore[valid-type]
    prediction: _Nothing = None  # type: ignore[valid-type]
    reasoning_effort: _only("none") = None  # type: ignore[valid-type]
    verbosity: _only("medium") = None  # type: ignore[valid-type]
    web_search_options: _Nothing = None  # type: ignore[valid-type]
    moderation: _Nothing = None  # type: ignore[valid-type]
    service_tier: _only("auto", "default") = None  # type: ignore[valid-type]
    store: _only(False) = None  # type: ignore[valid-type]
    metadata: _only({}) = None  # type: ignore[valid-type]
    prompt_cache_key: _Label = None
    safety_identifier: _Label = None


Request = TypeVar("Request", CompletionRequest, ChatRequest)


def parse(body: bytes, kind: type[Request]) -> Request:
    """Check a request's body. Raises ApiError 400 that names the wrong parameter."""
    try:
        document = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        request = kind.model_validate(document)
    except ValidationError as error:
        raise _api_error(error, document) from None
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: only with stream", "stream_options", "invalid_value")
    return request


def _api_error(error: ValidationError, document: dict[str, Any]) -> ApiError:
    # Of several alternatives, the value was meant for the one whose error is about more than its type, or lies deepest.
    found = [(_steps(e["loc"], document), e) for e in error.errors(include_url=False, include_input=False)]
    steps, worst = max(found, key=lambda pair: (not pair[1]["type"].endswith("_type"), len(pair[0])))
    param = "".join(f"[{s}]" if isinstance(s, int) else f".{s[:64]}" for s in steps).removeprefix(".")
    known = {
        "extra_forbidden": ("is not a parameter", "unknown_parameter"), "missing": ("is required", "invalid_value"),
        "unsupported": (worst["msg"], "unsupported_parameter"),
    }  # fmt: skip
    message, code = known.get(worst["type"], (worst["msg"], "invalid_value"))
    return ApiError(400, f"{param}: {message[:1].lower()}{message[1:]}", param, code)


def _steps(where: Sequence[str | int], document: Any) -> list[str | int]:
    """The keys and indices in pydantic's location, which also has names of alternatives."""
    steps: list[str | int] = []
    for number, part in enumerate(where):
        inside = isinstance(document, dict) and part in document
        inside = inside or (isinstance(document, list) and isinstance(part, int) and part < len(document))
        if inside:
            document = document[part]
        elif not (isinstance(document, dict) and number == len(where) - 1):  # a key that is missing
            continue
        steps.append(part)
    return steps
