"""What a request asks for: from OpenAI's parameters to jobs, within the limits."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crosstrain.inference.encoding import Encoders, EncodingError
from crosstrain.inference.generation import Sampling, room_after
from crosstrain.modeling.base import Model
from crosstrain.serving.api_error import ApiError
from crosstrain.serving.chat_format import ChatFormat, Prompt, Turn, completion_prompt
from crosstrain.serving.images import picture
from crosstrain.serving.jobs import Event, Job
from crosstrain.serving.limits import Limits
from crosstrain.serving.requests import ChatRequest, CompletionRequest, ImagePart, TextPart, _Asking
from crosstrain.utils.errors import UserError, sentence

_USUAL_TOKENS = 16  # of a completion for which max_tokens is not given; OpenAI's number

Deliver = Callable[[Event], None]


@dataclass(frozen=True)
class Call:
    """A request that is understood: its jobs, and what its answer needs to know besides."""

    jobs: list[Job]
    choices: int
    prompt_tokens: int
    echoes: list[str]  # by choice: what stands before its text


class Service:
    """A model under a name. Its methods may be called in several threads."""

    def __init__(
        self, name: str, model: Model, tokenizer: Any, chat_format: ChatFormat, encoders: Encoders, limits: Limits
    ) -> None:
        self.name, self.model, self.limits, self.chat_format = name, model, limits, chat_format
        self._tokenizer, self.encoders = tokenizer, encoders
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters of a token, at least

    def completion(self, request: CompletionRequest, deliver: Deliver) -> Call:
        """ApiError for what cannot be."""
        self._check(request)
        given = request.prompt
        many = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts: list[Any] = given if many else [given]  # type: ignore[assignment]
        if len(prompts) > self.limits.prompts:
            raise _wrong("prompt", f"{len(prompts)} prompts; at most {self.limits.prompts} are taken")
        wanted = _USUAL_TOKENS if request.max_tokens is None else request.max_tokens
        if not wanted and not request.echo:
            raise _wrong("max_tokens", "0 gives nothing unless the prompt is asked for with echo")
        self._most("logprobs", request.logprobs or 0, self.limits.logprobs)
        score = bool(request.echo) and request.logprobs is not None
        jobs, echoes, total, n = [], [], 0, request.n or 1
        self._most("n", n * len(prompts), self.limits.waiting)
        for number, one in enumerate(prompts):
            self._known(one)
            self._short("prompt", len(one) if isinstance(one, str) else 0)
            try:
                prompt = completion_prompt(self.encoders, one, self._tokenizer.eos_token_id)
            except EncodingError as error:
                raise _not_encoded("prompt", error) from None
            room = self._room(prompt, "prompt", least=min(wanted, 1))
            new = min(wanted, room) if request.max_tokens is None else self._fits(wanted, room, prompt, "max_tokens")
            jobs += self._jobs(request, prompt, new, request.logprobs, score, number * n, deliver)
            total += len(prompt.ids)
            echo = (one if isinstance(one, str) else self._tokenizer.decode(one)) if request.echo else ""
            echoes += [echo] * n
        return Call(jobs, n * len(prompts), total, echoes)

    def chat(self, request: ChatRequest, deliver: Deliver) -> Call:
        """ApiError for what cannot be."""
        self._check(request)
        if request.max_tokens == 0:
            raise _wrong("max_tokens", "has to be above 0")
        if request.top_logprobs is not None and not request.logprobs:
            raise _wrong("top_logprobs", "only with logprobs")
        self._most("top_logprobs", request.top_logprobs or 0, self.limits.logprobs)
        both = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(both) > 1:
            raise _wrong("max_tokens", "is the former name of max_completion_tokens; give one of them")
        n = request.n or 1
        self._most("n", n, self.limits.waiting)
        self._short("messages", sum(len(p.text) for m in request.messages for p in m.parts if isinstance(p, TextPart)))
        try:
            prompt = self.chat_format(self._turns(request))
        except EncodingError as error:
            raise _not_encoded("messages", error) from None
        except UserError as error:
            raise _wrong("messages", sentence(error)) from None
        room = self._room(prompt, "messages", least=1)
        which = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
        new = self._fits(both.pop() or 0, room, prompt, which) if both else room
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        jobs = self._jobs(request, prompt, new, logprobs, False, 0, deliver)
        return Call(jobs, n, len(prompt.ids), [""] * n)

    # ---- parts

    def _turns(self, request: ChatRequest) -> list[Turn]:
        if len(request.messages) > self.limits.messages:
            raise _wrong("messages", f"{len(request.messages)}; at most {self.limits.messages} are taken")
        images = sum(isinstance(part, ImagePart) for message in request.messages for part in message.parts)
        if images and not self.chat_format.sees:
            raise _wrong("messages", f"{self.name} takes no images")
        if images > self.limits.images:
            raise _wrong("messages", f"{images} images; at most {self.limits.images} are taken")
        turns = []
        for i, message in enumerate(request.messages):
            turn = Turn("system" if message.role == "developer" else message.role)
            for j, part in enumerate(message.parts):
                if isinstance(part, ImagePart):
                    where = f"messages[{i}].content[{j}].image_url.url"
                    turn.parts.append(picture(part.image_url.url, self.limits.image_pixels, where))
                else:
                    turn.parts.append(part.text)
            turns.append(turn)
        return turns

    def _check(self, request: _Asking) -> None:
        if request.model != self.name:
            raise ApiError(
                404, f"there is no model {request.model[:200]!r} here, only {self.name!r}", "model", "model_not_found"
            )
        if len(request.stops) > self.limits.stops:
            raise _wrong("stop", f"{len(request.stops)} strings; at most {self.limits.stops} are taken")
        if not all(0 < len(stop) <= self.limits.stop_characters for stop in request.stops):
            raise _wrong("stop", f"each string has to have 1 to {self.limits.stop_characters} characters")

    def _most(self, param: str, value: int, most: int) -> None:
        if value > most:
            raise _wrong(param, f"{value}; at most {most} are taken")

    def _known(self, prompt: Any) -> None:
        size = self.model.vocab_size
        if isinstance(prompt, list) and any(not 0 <= i < (size or i + 1) for i in prompt):
            raise _wrong("prompt", f"a token is not one of the model's, which are 0 to {(size or 0) - 1}")

    def _short(self, param: str, characters: int) -> None:
        """Refuse without counting tokens, which takes time, what has too many in any case."""
        limit = self.model.max_length
        if limit is not None and characters > limit * self._longest:
            raise ApiError(
                400, f"{param}: {characters} characters are more than the model's {limit} tokens", param,
                "context_length_exceeded",
            )  # fmt: skip

    def _room(self, prompt: Prompt, param: str, least: int) -> int:
        """Tokens that the model can add; ApiError where these are fewer than `least`."""
        limit = self.model.max_length
        if limit is not None and len(prompt.ids) == limit and not least:
            return 0
        try:
            return min(room_after(self.model, prompt.sample), self.limits.tokens if limit is None else limit)
        except UserError as error:
            raise ApiError(400, f"{param}: {sentence(error)}", param, "context_length_exceeded") from None

    def _fits(self, wanted: int, room: int, prompt: Prompt, param: str) -> int:
        if wanted > room:
            raise ApiError(
                400, f"{param}: {wanted} new tokens do not fit after the prompt's {len(prompt.ids)}; at most {room} do",
                param, "context_length_exceeded",
            )  # fmt: skip
        return wanted

    def _jobs(
        self, request: _Asking, prompt: Prompt, new: int, logprobs: int | None, score: bool, first: int,
        deliver: Deliver,
    ) -> list[Job]:  # fmt: skip
        """A prompt's completions, in parts that can be computed together; `first` is the first one's choice."""
        sampling = Sampling(
            max(new, 1), _or(request.temperature, 1.0), request.top_k or 0, _or(request.top_p, 1.0),
            seed=secrets.randbits(63) if request.seed is None else request.seed,
        )  # fmt: skip
        deadline = time.monotonic() + self.limits.seconds
        n, size = request.n or 1, self.limits.batch
        stops, parts = (*prompt.stops, *request.stops), []
        for start in range(0, n, size):
            completions = {number: first + number for number in range(start, min(start + size, n))}
            parts.append(Job(prompt, sampling, new, stops, logprobs, score, completions, deliver, deadline))
        return parts


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _not_encoded(param: str, error: EncodingError) -> ApiError:
    status, retry = (503, 5) if error.code == "busy" else (400, None)
    return ApiError(status, f"{param}: {error}", param, error.code, retry)


def _wrong(param: str, what: str) -> ApiError:
    return ApiError(400, f"{param}: {what}", param, "invalid_value")
