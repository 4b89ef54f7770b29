"""Convert requests with OpenAI's parameters to jobs, within the server's limits."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from crosstrain import LimitError, Model, Sampling, UserError, as_prompt, sentence
from crosstrain.inference.detokenizer import TextStream
from crosstrain.inference.encoding import Encoders
from crosstrain.inference.generation import room_after
from crosstrain.utils.limited_process import NoProcess, TooLate

from .api_error import ApiError, wrong
from .chat_format import ChatFormat, Prompt, conversation
from .jobs import Event, Job
from .limits import Limits
from .requests import ChatRequest, CompletionRequest, TextPart, TextRequest

_TOO_LONG = "context_length_exceeded"
_LIMITS: dict[type, str] = {TooLate: "encoding_timeout", LimitError: "encoding_failed"}
_USUAL_TOKENS = 16  # token limit of a completion without max_tokens; OpenAI's default

Deliver = Callable[[Event], None]


class Service:
    """A model that is served under a name. The methods may be called from any thread, and raise ApiError."""

    def __init__(
        self, name: str, model: Model, tokenizer: Any, chat_format: ChatFormat, encoders: Encoders, limits: Limits
    ) -> None:
        self.name, self.model, self.limits, self.chat_format = name, model, limits, chat_format
        self._tokenizer, self.encoders = tokenizer, encoders
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # upper bound on the characters in a token

    def completion(self, request: CompletionRequest, deliver: Deliver) -> list[Job]:
        """Return the jobs of a completion request."""
        self._check(request, len(request.prompts))
        wanted = request.max_tokens
        if wanted == 0 and not request.echo:
            raise wrong("max_tokens", "0 generates nothing; it is allowed only with echo")
        jobs = list[Job]()
        for given in request.prompts:
            prompt = self._completion_prompt(given)
            new = self._new_tokens(prompt, "prompt", wanted, "max_tokens")
            new = min(new, _USUAL_TOKENS) if wanted is None else new
            echo = (given if isinstance(given, str) else self._tokenizer.decode(given)) if request.echo else ""
            score = bool(request.echo) and request.logprobs is not None
            jobs += self._jobs(request, prompt, new, request.logprobs, deliver, score, echo, len(jobs))
        return jobs

    def chat(self, request: ChatRequest, deliver: Deliver) -> list[Job]:
        """Return the jobs of a chat request."""
        self._check(request, 1)
        if request.top_logprobs is not None and not request.logprobs:
            raise wrong("top_logprobs", "is allowed only with logprobs")
        param = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
        wanted = getattr(request, param)
        if request.max_completion_tokens not in (None, wanted):
            raise wrong("max_tokens", "is the old name of max_completion_tokens; give only one of them")
        texts = [part.text for message in request.messages for part in message.parts if isinstance(part, TextPart)]
        self._check_length("messages", sum(map(len, texts)))
        messages, images = conversation(request.messages, self.chat_format.takes_images, self.limits)
        with _blamed_on("messages"):
            prompt = self.chat_format.make(messages, images)
        new = self._new_tokens(prompt, "messages", wanted, param)
        return self._jobs(request, prompt, new, (request.top_logprobs or 0) if request.logprobs else None, deliver)

    def _check(self, request: TextRequest, prompts: int) -> None:
        if request.model not in (None, self.name):
            raise ApiError(
                404,
                f"the model {str(request.model)[:200]!r} does not exist; the server has only {self.name!r}",
                "model",
                "model_not_found",
            )
        if (count := prompts * (request.n or 1)) > self.limits.waiting:
            raise wrong("n", f"got {count} completions; at most {self.limits.waiting} are allowed")

    def _completion_prompt(self, given: str | list[int]) -> Prompt:
        size, end = self.model.vocab_size, self._tokenizer.eos_token_id
        if isinstance(given, str):
            self._check_length("prompt", len(given))
            with _blamed_on("prompt"):
                given = self.encoders.encode("text", given)
        elif any(not 0 <= i < (size or i + 1) for i in given):
            raise wrong("prompt", f"a token ID is not in the model's vocabulary{f', 0 to {size - 1}' if size else ''}")
        return Prompt(as_prompt(given, end), [end])

    def _check_length(self, param: str, characters: int) -> None:
        """Refuse a text that certainly has too many tokens, without encoding it."""
        limit = self.model.max_length
        if limit is not None and characters > limit * self._longest:
            raise wrong(param, f"{characters} characters do not fit into the model's {limit} tokens", _TOO_LONG)

    def _new_tokens(self, prompt: Prompt, param: str, wanted: int | None, wanted_param: str) -> int:
        """Return the number of new tokens: `wanted`, or all that fit. Raises ApiError if there is too little room."""
        with _blamed_on(param, _TOO_LONG):
            room = room_after(self.model, prompt.sample, least=0 if wanted == 0 else 1)
        if self.model.max_length is None:
            room = self.limits.tokens
        if wanted is not None and wanted > room:
            raise wrong(
                wanted_param,
                f"{wanted} new tokens do not fit after the prompt's {len(prompt.ids)} tokens; at most {room} fit",
                _TOO_LONG,
            )
        return room if wanted is None else wanted

    def _jobs(
        self,
        request: TextRequest,
        prompt: Prompt,
        new: int,
        logprobs: int | None,
        deliver: Deliver,
        score: bool = False,
        echo: str = "",
        first: int = 0,
    ) -> list[Job]:
        """Return the jobs of a prompt's completions; `first`: index of the first completion in the request."""
        sampling = Sampling(
            max(new, 1),
            1.0 if request.temperature is None else request.temperature,
            request.top_k or 0,
            request.top_p or 1.0,
            seed=secrets.randbits(63) if request.seed is None else request.seed,
        )
        deadline, stops = time.monotonic() + self.limits.seconds, (*prompt.stops, *request.stops)
        return [
            Job(
                sampling,
                number,
                prompt.ends,
                TextStream(self._tokenizer, stops, prompt.strip),
                prompt=prompt,
                choice=first + number,
                echo=echo,
                generates=new > 0,
                logprobs=logprobs,
                score_prompt=score,
                deliver=deliver,
                deadline=deadline,
            )
            for number in range(request.n or 1)
        ]


@contextmanager
def _blamed_on(param: str, code: str = "invalid_value") -> Iterator[None]:
    """Turn a UserError raised in the block into an ApiError about the parameter `param`."""
    try:
        yield
    except NoProcess as error:
        raise ApiError(503, str(error), param, "busy") from None
    except UserError as error:
        raise wrong(param, sentence(error), _LIMITS.get(type(error), code)) from None
