"""Tasks from lm-evaluation-harness (Gao et al., 2021-) under any runner, for `crosstrain evaluate --tasks`.

This module needs the package lm_eval. Every rank has all requests, and computes its share of them.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from crosstrain import (
    IGNORE_INDEX,
    ForwardMode,
    Runner,
    Sample,
    Sampling,
    UserError,
    as_prompt,
    did_you_mean,
    explained,
    finite,
    log,
)
from crosstrain.inference.detokenizer import TextStream
from crosstrain.inference.generation import Sequence, decode
from crosstrain.utils import paths

from .remembered import Likelihood, Pair, Remembered

_LENGTH = 2048  # maximum length in tokens if the model has no limit
_NEW = 256  # maximum number of new tokens if the task does not set a maximum
_TOKENS = 8192  # maximum number of tokens in a batch, with padding
_BOOTSTRAPS = 1000  # bootstrap samples for standard errors without a formula
T, R = TypeVar("T"), TypeVar("R")
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(TemplateLM):
    """Adapter to lm-evaluation-harness; a log-likelihood is the negative of the training loss.

    Use its methods inside `runner.evaluating()`.
    """

    def __init__(
        self, runner: Runner, tokenizer: Any, encode: Callable[[str], list[int]], *,
        key: str | None = None, quiet: bool = False,
    ) -> None:  # fmt: skip
        """tokenizer: for decoding. key: of log-likelihoods that a later evaluation may use; None: it must not use them.

        quiet: without progress bars and lines in the log.
        """
        super().__init__()
        self.runner, self.tokenizer, self._encode, self.quiet = runner, tokenizer, encode, quiet
        self._length = runner.model.max_length or _LENGTH
        self._remembered = Remembered(key, runner.world)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return "checkpoint"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text without a beginning-of-text token, as in training."""
        return self._encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        return self._likelihoods([(context, continuation) for _, context, continuation in requests], disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return each text's log-likelihood given the prefix token, in windows of the model's maximum length."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        pairs, owners = list[Pair](), list[int]()
        for owner, ids in enumerate(texts):
            pairs += map(make_disjoint_window, get_rolling_token_windows(ids, self.prefix_token_id, self._length, 1))
            owners += [owner] * (len(pairs) - len(owners))
        totals = [0.0] * len(texts)
        for owner, (likelihood, _) in zip(owners, self._likelihoods(pairs, disable_tqdm), strict=True):
            totals[owner] += likelihood
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate texts, greedily unless the task samples. Raises UserError for an unknown setting of a task."""
        prompts, found = list[Sample](), dict[int, str]()
        alike: dict[str, list[int]] = {}  # settings -> numbers of requests
        for number, request in enumerate(requests):
            context, given = request.args
            if unknown := set(given) - _KNOWN:
                raise UserError(f"--tasks: a task sets {min(unknown)} for generation, which is not supported")
            room = self._length - self._new_tokens(given)
            prompts.append(as_prompt(self.tok_encode(context)[-room:], self.eot_token_id))
            alike.setdefault(repr(given), []).append(number)
        for numbers in alike.values():
            texts = self._dealt(
                [prompts[number] for number in numbers],
                lambda prompt: len(prompt["input_ids"]),
                partial(self._generate, given=requests[numbers[0]].args[1]),
                disable_tqdm,
            )
            found |= zip(numbers, texts, strict=True)
        return [found[number] for number in range(len(requests))]

    def _dealt(
        self, requests: list[T], length: Callable[[T], int], compute: Callable[[list[T]], list[R]], quiet: bool
    ) -> list[R]:
        """Compute batches of requests of similar length, dealt over the ranks. Collective.

        The batches do not depend on the number of ranks, so neither do the results.
        """
        left, batches = sorted(range(len(requests)), key=lambda i: (-length(requests[i]), i)), list[list[int]]()
        while left:
            rows = max(1, _TOKENS // max(length(requests[left[0]]), 1)) if self.runner.model.takes_positions else 1
            batches.append(left[:rows])
            left = left[rows:]
        ranks, found = self.runner.dp, dict[int, R]()
        for first in tqdm(
            range(0, len(batches), ranks.size), disable=quiet or self.quiet or self.runner.world.rank > 0
        ):
            turn = first + ranks.rank
            batch = batches[turn] if turn < len(batches) else batches[first][:1]  # a forward may be collective
            results = compute([requests[i] for i in batch])
            if turn < len(batches):
                found |= zip(batch, results, strict=True)
        everything = {i: result for held in ranks.all_gather(found) for i, result in held.items()}
        return [everything[i] for i in range(len(requests))]

    def _likelihoods(self, pairs: list[Pair], quiet: bool) -> list[Likelihood]:
        """Return (log p(continuation | context), the continuation is the greedy one) of each pair."""

        def length(pair: Pair) -> int:
            return min(len(pair[0]) + len(pair[1]), self._length)

        return self._remembered.of(pairs, lambda new: self._dealt(new, length, self._likelihood, quiet))

    def _likelihood(self, pairs: list[Pair]) -> list[Likelihood]:
        """Compute one batch. If a pair has too many tokens for the model, the first are dropped."""
        rows = [(context + continuation)[-(self._length + 1) :] for context, continuation in pairs]
        ids = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.long)
        labels = torch.full_like(ids, IGNORE_INDEX)
        for i, (row, (_, continuation)) in enumerate(zip(rows, pairs, strict=True)):
            stop = len(row) - 1
            ids[i, :stop] = torch.tensor(row[:-1])
            start = max(0, stop - len(continuation))
            labels[i, start:stop] = torch.tensor(row[1 + start :])
        hits, targets = list[torch.Tensor](), labels != IGNORE_INDEX

        def both(losses: torch.Tensor) -> torch.Tensor:
            right = torch.zeros_like(losses)
            right[targets.to(losses.device)] = hits[0].to(losses.dtype)
            return torch.stack([losses.double().sum(1), right.double().sum(1)])

        found = self.runner.evaluate({"input_ids": ids, "labels": labels}, ForwardMode(reduce=both, hits=hits.append))
        counts = targets.sum(1).tolist()
        return [(-loss, right == count) for loss, right, count in zip(*found.tolist(), counts, strict=True)]

    def _new_tokens(self, given: Mapping[str, Any]) -> int:
        """Return the maximum number of new tokens in the settings of a task; a prompt has at least one token."""
        return min(given.get("max_gen_toks", _NEW), self._length - 1)

    def _generate(self, prompts: list[Sample], given: Mapping[str, Any]) -> list[str]:
        """Complete one batch of prompts with the settings of a task."""
        until = given.get("until") or []
        sampling = Sampling(
            self._new_tokens(given),
            float(given.get("temperature") or 0) if given.get("do_sample") else 0.0,
            given.get("top_k") or 0,
            given.get("top_p") or 1.0,
        )
        stops = [until] if isinstance(until, str) else until
        rows = [Sequence(sampling, 0, [self.eot_token_id], TextStream(self.tokenizer, stops)) for _ in prompts]
        return decode(self.runner, prompts, rows, group=self.runner.dp)


@cache
def known_tasks(folder: str | None) -> TaskManager:
    """Return the tasks of the harness, of configs/tasks and of `folder`. Raises UserError if `folder` is missing."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--task-path: {folder} is not a folder")
    return TaskManager(include_path=[str(paths.home() / "configs" / "tasks"), *([folder] if folder else [])])


def run_tasks(model: HarnessModel, tasks: list[str], folder: str | None, limit: int | None) -> dict[str, Any]:
    """Return task -> metrics; the values are the same on every rank. Collective.

    `folder`: additional task files for the harness. `limit`: number of documents per task; None: all. Raises UserError
    for unknown tasks and missing data.
    """
    manager = known_tasks(folder)
    known = manager.all_tasks
    for name in tasks:
        if name not in known:
            hint = did_you_mean(name, known, "--task-path adds a folder of task files")
            raise UserError(f"--tasks: the harness has no task {name}; {hint}")
    if model.runner.context.size > 1:
        raise UserError("--tasks: every rank needs whole sequences; set run.runner.context_parallel=1")
    with model.runner.evaluating(), explained("--tasks: the harness failed"):  # a task's files may be missing or broken
        found = simple_evaluate(
            model,
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
        if not model.quiet:
            log.info("%s | %s", name, " | ".join(f"{key.removesuffix(',none')} {value:.6g}" for key, value in known))
    return model.runner.world.broadcast(results)
