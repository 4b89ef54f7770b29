"""Tasks from lm-evaluation-harness (Gao et al., 2021-) under any runner, for `crosstrain evaluate --tasks`.

This module needs the package lm_eval. Every rank runs the same requests.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from crosstrain import (
    IGNORE_INDEX,
    OpenModel,
    Sampling,
    UserError,
    as_prompt,
    did_you_mean,
    explained,
    finite,
    generate,
    log,
)
from crosstrain.inference.decoder import DecodeState

_LENGTH = 2048  # maximum length in tokens if the model has no limit
_NEW = 256  # maximum number of new tokens if the task does not set a maximum
_BOOTSTRAPS = 1000  # bootstrap samples for standard errors without a formula
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(TemplateLM):
    """Adapter to lm-evaluation-harness; a log-likelihood is the negative of the training loss.

    Use this class inside `runner.evaluating()`.
    """

    def __init__(self, model: OpenModel) -> None:
        super().__init__()
        self._runner, self.tokenizer, self._encoders = model.runner, model.tokenizer, model.encoders
        self._length, self._quiet = model.runner.model.max_length or _LENGTH, not model.is_main

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return "checkpoint"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text without a beginning-of-text token, as in training."""
        return self._encoders.encode("text", string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        return [
            (self._likelihood(context, continuation), self._is_greedy(context, continuation))
            for _, context, continuation in tqdm(requests, disable=disable_tqdm or self._quiet)
        ]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return each text's log-likelihood given the prefix token, in windows of the model's maximum length."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm or self._quiet):
            windows = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self._length, 1)
            found.append(sum(self._likelihood(*make_disjoint_window(window)) for window in windows))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate texts, greedily unless the task samples. Raises UserError for an unknown setting of a task."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm or self._quiet):
            context, given = request.args
            if unknown := set(given) - _KNOWN:
                raise UserError(f"--tasks: a task sets {min(unknown)} for generation, which is not supported")
            new = min(given.get("max_gen_toks", _NEW), self._length - 1)
            until = given.get("until") or []
            sampling = Sampling(
                new,
                float(given.get("temperature") or 0) if given.get("do_sample") else 0.0,
                given.get("top_k") or 0,
                given.get("top_p") or 1.0,
            )
            prompt = as_prompt(self.tok_encode(context)[-(self._length - new) :], self.eot_token_id)
            stops = [until] if isinstance(until, str) else until
            found += generate(self._runner, self.tokenizer, prompt, sampling, stops=stops)
        return found

    def _likelihood(self, context: list[int], continuation: list[int]) -> float:
        """Return log p(continuation | context); if there are too many tokens for the model, the first are dropped."""
        ids = (context + continuation)[-(self._length + 1) :]
        labels = torch.tensor([ids[1:]])
        labels[0, : max(0, len(ids) - 1 - len(continuation))] = IGNORE_INDEX
        return -float(self._runner.evaluate({"input_ids": torch.tensor([ids[:-1]]), "labels": labels}))

    def _is_greedy(self, context: list[int], continuation: list[int]) -> bool:
        """Return True if every token of the continuation is the argmax at its position."""
        before = context[max(0, len(context) + len(continuation) - self._length - 1) :]
        if not before:
            return False
        state = DecodeState(self._runner, [as_prompt(before, self.eot_token_id)])
        for token in continuation:
            if int(state.logits()[0].argmax()) != token:
                return False
            state.append(torch.tensor([token]))
        return True


def run_tasks(model: OpenModel, tasks: list[str], folder: str | None, limit: int | None) -> dict[str, Any]:
    """Return task -> metrics; the values are the same on every rank. Collective.

    `folder`: additional task files for the harness. `limit`: number of documents per task; None: all. Raises
    UserError for unknown tasks and missing data.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--task-path: {folder} is not a folder")
    manager = TaskManager(include_path=folder)
    known = manager.all_tasks
    for name in tasks:
        if name not in known:
            hint = did_you_mean(name, known, "--task-path adds a folder of task files")
            raise UserError(f"--tasks: the harness has no task {name}; {hint}")
    with model.runner.evaluating(), explained("--tasks: the harness failed"):  # a task's files may be missing or broken
        found = simple_evaluate(
            HarnessModel(model),
            tasks=tasks,
            task_manager=manager,
            limit=limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
        )
    results: dict[str, Any] = {}
    for name, metrics in (found or {"results": {}})["results"].items():  # only rank 0 gets results from the harness
        results[name] = {key: finite(value) for key, value in metrics.items() if isinstance(value, (int, float))}
        known = ((key, value) for key, value in results[name].items() if value is not None and "," in key)
        log.info("%s | %s", name, " | ".join(f"{key.removesuffix(',none')} {value:.6g}" for key, value in known))
    return model.runner.world.broadcast(results)
