"""The hook that generates completions of a run's prompts, at each validation and at the end of training."""

import textwrap
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from crosstrain import (
    Callback,
    RunOptions,
    Sample,
    Sampling,
    UserError,
    as_prompt,
    generate,
    log,
    registry,
)
from crosstrain.inference.encoding import open_tokenizer, text_encoder


@registry.register_callback("prompt_samples")
class PromptSamples(Callback):
    """Completes `run.sample_prompts`, each time with the same random numbers; every run has this hook.

    Training's random state is unchanged.
    """

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        run: RunOptions = trainer.run
        self._prompts: list[tuple[str, Sample]] = []
        self._sampling = Sampling(max_new_tokens=run.sample_tokens, temperature=0.8, top_k=50, seed=run.seed)
        tokenizer = trainer.dataset.tokenizer_path
        if tokenizer is not None and run.sample_prompts:
            self._tokenizer = made = open_tokenizer(tokenizer)
            encode = text_encoder(made)
            self._prompts = [(text, as_prompt(encode(text), made.eos_token_id)) for text in run.sample_prompts]
        self._drawn: list[dict[str, str]] | None = None  # completions of the current step; None: not generated

    def before_batch(self) -> None:
        self._drawn = None

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        self._drawn = self.draw()
        if self._drawn:
            self.trainer.row["generated"] = self._drawn

    def on_end(self) -> None:
        if not self.trainer.stopped:
            for sample in self.draw() if self._drawn is None else self._drawn:
                text = sample["prompt"] + sample["text"]
                log.info("sample of generated text:\n%s", textwrap.indent(text, "    | ", lambda _: True))

    def draw(self) -> list[dict[str, str]]:
        """Return {"prompt": ..., "text": ...} for every prompt; all ranks return the same texts. Collective."""
        out = []
        # Every generated token changes the length, and a recompilation for each length would be slow.
        with torch.compiler.set_stance("force_eager") if self.trainer.run.compile != "none" else nullcontext():
            for prompt, sample in list(self._prompts):
                try:
                    text = generate(self.trainer.runner, self._tokenizer, sample, self._sampling)[0]
                except UserError as error:  # drop a prompt that is too long; training goes on
                    log.warning("run.sample_prompts: %s", error)
                    self._prompts.remove((prompt, sample))
                else:
                    out.append({"prompt": prompt, "text": text})
        return out
