"""Completions of a run's prompts, drawn at each validation and at the end."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from crosstrain.config.run_options import RunOptions
from crosstrain.engine.runner import Runner
from crosstrain.inference.generation import Sampling, generate
from crosstrain.utils.errors import UserError
from crosstrain.utils.logging import log


class PromptSamples:
    """Continues `run.sample_prompts`, each time with the same random numbers; training's are not touched."""

    def __init__(self, runner: Runner, run: RunOptions, tokenizer: Path | None) -> None:
        self._runner, self._folder, self._compiled = runner, tokenizer, run.compile != "none"
        self._prompts = list(run.sample_prompts) if tokenizer is not None else []
        self._sampling = Sampling(max_new_tokens=run.sample_tokens, temperature=0.8, top_k=50, seed=run.seed)
        self._tokenizer: Any = None

    def draw(self) -> list[dict[str, str]]:
        """{"prompt", "text"} of every prompt, the same on every rank. Collective."""
        if self._prompts and self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
        out = []
        # Texts grow by a token at a time: to compile for each of these lengths would take longer than to train on.
        with torch.compiler.set_stance("force_eager") if self._compiled else nullcontext():
            for prompt in list(self._prompts):
                try:
                    text = generate(self._runner, self._tokenizer, prompt, self._sampling)[0]
                except UserError as error:  # a prompt that is too long is no reason to fail, on any rank
                    log.warning("run.sample_prompts: %s", error)
                    self._prompts.remove(prompt)
                else:
                    out.append({"prompt": prompt, "text": text})
        return out
