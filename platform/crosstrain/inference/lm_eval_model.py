"""The model interface of lm-evaluation-harness (Gao et al., 2021-), under any runner.

Needs the package lm_eval. Every rank of a runner computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from crosstrain.engine.runner import Runner
from crosstrain.inference.decoder import DecodeState
from crosstrain.inference.generation import Sampling, as_prompt, generate
from crosstrain.utils.errors import UserError
from crosstrain.utils.types import IGNORE_INDEX

_LENGTH = 2048  # tokens, where the model has no limit
_NEW = 256  # tokens of a text, where the task does not say
Encode = Callable[[str], list[int]]  # a text's token ids
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(TemplateLM):
    """Log-likelihoods are minus the training loss. Use it inside `runner.evaluating()`."""

    def __init__(self, runner: Runner, tokenizer: Any, encode: Encode, quiet: bool) -> None:
        super().__init__()
        self._runner, self.tokenizer, self._encode, self._quiet = runner, tokenizer, encode, quiet
        self._length = runner.model.max_length or _LENGTH

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return "checkpoint"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, without a token for its beginning, as in training."""
        return self._encode(string)

    # ---- requests of tasks

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for _, context, continuation in tqdm(requests, disable=disable_tqdm or self._quiet):
            likelihood = self._likelihood(context, continuation)
            found.append((likelihood, self._is_greedy(context, continuation)))
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, in windows of the model's length; an end-of-text token comes first."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm or self._quiet):
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self._length, 1)
            found.append(sum(self._likelihood(*make_disjoint_window(window)) for window in windows))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts, unless a task samples; UserError for a task's unknown setting."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm or self._quiet):
            context, given = request.args
            if unknown := set(given) - _KNOWN:
                raise UserError(f"--tasks: a task asks for {min(unknown)} in generation, which is not known here")
            new = min(given.get("max_gen_toks", _NEW), self._length - 1)
            until = given.get("until") or []
            sampling = Sampling(
                new, float(given.get("temperature") or 0) if given.get("do_sample") else 0.0,
                given.get("top_k") or 0, given.get("top_p") or 1.0,
            )  # fmt: skip
            prompt = as_prompt(self.tok_encode(context)[-(self._length - new) :], self.eot_token_id)
            stops = [until] if isinstance(until, str) else until
            found += generate(self._runner, self.tokenizer, prompt, sampling, stops=stops)
        return found

    # ---- computation

    def _likelihood(self, context: list[int], continuation: list[int]) -> float:
        """log p(continuation | context); the beginning is cut off where both exceed the model's length."""
        ids = (context + continuation)[-(self._length + 1) :]
        labels = torch.tensor([ids[1:]])
        labels[0, : max(0, len(ids) - 1 - len(continuation))] = IGNORE_INDEX
        return -float(self._runner.evaluate({"input_ids": torch.tensor([ids[:-1]]), "labels": labels}))

    def _is_greedy(self, context: list[int], continuation: list[int]) -> bool:
        """True if every token of the continuation is the likeliest one in its place."""
        before = context[max(0, len(context) + len(continuation) - self._length - 1) :]
        if not before:
            return False
        state = DecodeState(self._runner, [as_prompt(before, self.eot_token_id)])
        for token in continuation:
            if int(state.logits()[0].argmax()) != token:
                return False
            state.append(torch.tensor([token]))
        return True
