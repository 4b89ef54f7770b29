"""From OpenAI's parameters to jobs, within the server's limits."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from crosstrain.inference.encoding import Encoders, EncodingError
from crosstrain.inference.generation import Sampling, room_after
from crosstrain.modeling.base import Model
from crosstrain.serving.api_error import ApiError, wrong
from crosstrain.serving.chat_format import ChatFormat, Prompt, Turn, completion_prompt
from crosstrain.serving.images import picture
from crosstrain.serving.jobs import Event, Job
from crosstrain.serving.limits import Limits
from crosstrain.serving.requests import ChatRequest, CompletionRequest, ImagePart, TextPart, TextRequest
from crosstrain.utils.errors import UserError, sentence

_TOO_LONG = "context_length_exceeded"
_USUAL_TOKENS = 16  # of a completion for which max_tokens is not given; OpenAI's number

Deliver = Callable[[Event], None]


@dataclass
class RequestPlan:
    """The jobs of a request, and what its response needs besides."""

    jobs: list[Job] = field(default_factory=list)
    prompt_tokens: int = 0
    echoes: list[str] = field(default_factory=list)  # by choice: the text that comes before its own


class Service:
    """A model under a name. Its methods may be called in several threads; they raise ApiError."""

    def __init__(
        self, name: str, model: Model, tokenizer: Any, chat_format: ChatFormat, encoders: Encoders, limits: Limits
    ) -> None:
        self.name, self.model, self.limits, self.chat_format = name, model, limits, chat_format
        self._tokenizer, self.encoders = tokenizer, encoders
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters of a token, at least

    def completion(self, request: CompletionRequest, deliver: Deliver) -> RequestPlan:
        """The jobs of a completion request."""
        prompts = request.prompts
        self._check(request, len(prompts))
        wanted = _USUAL_TOKENS if request.max_tokens is None else request.max_tokens
        if not wanted and not request.echo:
            raise wrong("max_tokens", "0 gives nothing unless the prompt is asked for with echo")
        plan = RequestPlan()
        for given in prompts:
            prompt = self._completion_prompt(given)
            room = self._room(prompt, "prompt", least=min(wanted, 1))
            new = min(wanted, room) if request.max_tokens is None else _fits(wanted, room, prompt, "max_tokens")
            echo = (given if isinstance(given, str) else self._tokenizer.decode(given)) if request.echo else ""
            score = bool(request.echo) and request.logprobs is not None
            self._plan(plan, request, prompt, new, request.logprobs, deliver, score, echo)
        return plan

    def chat(self, request: ChatRequest, deliver: Deliver) -> RequestPlan:
        """The jobs of a chat request."""
        self._check(request, 1)
        if request.top_logprobs is not None and not request.logprobs:
            raise wrong("top_logprobs", "only with logprobs")
        both = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(both) > 1:
            raise wrong("max_tokens", "is the former name of max_completion_tokens; give one of them")
        self._check_length(
            "messages", sum(len(p.text) for m in request.messages for p in m.parts if isinstance(p, TextPart))
        )
        try:
            prompt = self.chat_format.make(self._turns(request))
        except EncodingError as error:
            raise _not_encoded("messages", error) from None
        except UserError as error:
            raise wrong("messages", sentence(error)) from None
        room = self._room(prompt, "messages", least=1)
        param = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
        new = _fits(both.pop() or 0, room, prompt, param) if both else room
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        plan = RequestPlan()
        self._plan(plan, request, prompt, new, logprobs, deliver)
        return plan

    def _check(self, request: TextRequest, prompts: int) -> None:
        if request.model != self.name:
            raise ApiError(
                404, f"there is no model {request.model[:200]!r} here, only {self.name!r}", "model", "model_not_found"
            )
        if (count := prompts * (request.n or 1)) > self.limits.waiting:
            raise wrong("n", f"{count} completions; at most {self.limits.waiting} are taken")

    def _completion_prompt(self, given: str | list[int]) -> Prompt:
        size = self.model.vocab_size
        if isinstance(given, str):
            self._check_length("prompt", len(given))
        elif any(not 0 <= i < (size or i + 1) for i in given):
            raise wrong("prompt", f"a token is not one of the model's, which are 0 to {(size or 0) - 1}")
        try:
            return completion_prompt(self.encoders, given, self._tokenizer.eos_token_id)
        except EncodingError as error:
            raise _not_encoded("prompt", error) from None

    def _turns(self, request: ChatRequest) -> list[Turn]:
        images = sum(isinstance(part, ImagePart) for message in request.messages for part in message.parts)
        if images and not self.chat_format.takes_images:
            raise wrong("messages", f"{self.name} takes no images")
        if images > self.limits.images:
            raise wrong("messages", f"{images} images; at most {self.limits.images} are taken")
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

    def _check_length(self, param: str, characters: int) -> None:
        """Refuse a text that has too many tokens in any case, without the time to count them."""
        limit = self.model.max_length
        if limit is not None and characters > limit * self._longest:
            raise wrong(param, f"{characters} characters are more than the model's {limit} tokens", _TOO_LONG)

    def _room(self, prompt: Prompt, param: str, least: int) -> int:
        """Number of tokens that the model can add; ApiError if it is below `least`."""
        limit = self.model.max_length
        if limit is not None and len(prompt.ids) == limit and not least:
            return 0
        try:
            return min(room_after(self.model, prompt.sample), self.limits.tokens if limit is None else limit)
        except UserError as error:
            raise wrong(param, sentence(error), _TOO_LONG) from None

    def _plan(
        self, plan: RequestPlan, request: TextRequest, prompt: Prompt, new: int, logprobs: int | None,
        deliver: Deliver, score: bool = False, echo: str = "",
    ) -> None:  # fmt: skip
        """Add a prompt's completions, in jobs that fit into the batch."""
        sampling = Sampling(
            max(new, 1),
            1.0 if request.temperature is None else request.temperature,
            request.top_k or 0,
            request.top_p or 1.0,
            seed=secrets.randbits(63) if request.seed is None else request.seed,
        )
        deadline = time.monotonic() + self.limits.seconds
        n, size, first = request.n or 1, self.limits.batch, len(plan.echoes)
        for start in range(0, n, size):
            choices = {number: first + number for number in range(start, min(start + size, n))}
            stops = (*prompt.stops, *request.stops)
            plan.jobs.append(Job(prompt, sampling, new, stops, logprobs, score, choices, deliver, deadline))
        plan.prompt_tokens += len(prompt.ids)
        plan.echoes += [echo] * n


def _fits(wanted: int, room: int, prompt: Prompt, param: str) -> int:
    if wanted > room:
        problem = f"{wanted} new tokens do not fit after the prompt's {len(prompt.ids)}; at most {room} do"
        raise wrong(param, problem, _TOO_LONG)
    return wanted


def _not_encoded(param: str, error: EncodingError) -> ApiError:
    busy = ApiError(503, str(error), param, "busy", retry=5)
    return busy if error.code == "busy" else wrong(param, str(error), error.code)
