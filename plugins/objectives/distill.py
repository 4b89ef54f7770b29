"""Distillation: a student learns a teacher's distribution of the next token."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from crosstrain import (
    IGNORE_INDEX,
    Batch,
    ConfigError,
    ForwardMode,
    Fraction,
    Head,
    LanguageModel,
    Logits,
    Model,
    Objective,
    Policy,
    PositiveFloat,
    PositiveInt,
    RolloutOptions,
    Shard,
    Step,
    Text,
    registry,
    to_device,
    whole_pieces,
)
from crosstrain.checkpoint.load_weights import PretrainedWeights
from crosstrain.engine.precision import DTYPES

from .episode import Player, batch_of

_ROWS = 64  # tokens whose logits are computed at once
Divergence = Literal["forward", "reverse", "jensen_shannon"]


class Hidden(Head):
    """A head that returns the hidden states, and keeps what is needed to compute logits from some of them."""

    weight: Tensor
    logits: Logits

    def __call__(
        self, hidden: Tensor, weight: Tensor | None, labels: Tensor | None, vocab_size: int, logits: Logits,
        mode: ForwardMode,
    ) -> Tensor:  # fmt: skip
        if weight is None:
            raise ConfigError("run.objective.teacher: its head is not a linear layer, so it cannot be a teacher")
        bias = None if logits.bias is None else logits.bias[:vocab_size]
        self.weight, self.logits = weight[:vocab_size], Logits(bias, logits.scale, logits.softcap)
        return hidden

    def hidden(self, model: LanguageModel, batch: Batch) -> Tensor:
        """Return the hidden states [rows, length, H] of a model that is not trained, on its device."""
        return model(**to_device(batch, next(model.parameters()).device), mode=ForwardMode(head=self))

    def of(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [n, vocab_size] of hidden states [n, H]."""
        products = nn.functional.linear(hidden.to(self.weight.dtype), self.weight).float()
        self.logits.apply_(products)
        return products


def load_frozen(folder: str, dtype: str, device: torch.device) -> LanguageModel:
    """Return a causal language model to compute with, from a folder, a run or a Hugging Face name.

    dtype: fp32, bf16 or fp16.
    """
    model = _built(folder, device).requires_grad_(False).eval()
    tensors = model.weights.parameters() | model.weights.buffers()
    shards = [Shard("param", name, tuple(t.shape), whole_pieces(t.data, tuple(t.shape))) for name, t in tensors.items()]
    pretrained = PretrainedWeights.of(model)
    pretrained.summary(tensors)
    pretrained.fill(shards)
    return model.to(DTYPES[dtype])


def _built(folder: str, device: torch.device) -> LanguageModel:
    kind: Any = registry.get("model", "causal_lm")
    with device:
        return kind(kind.Options(pretrained=folder, make_vocab_size_divisible_by=1))


@registry.register_objective("distill")
class Distill(Objective):
    """The divergence of the student from a teacher with the same vocabulary, and optionally cross-entropy.

    The teacher is not trained, and every rank holds all of it.
    """

    @dataclass
    class Options:
        """The teacher and the divergence."""

        teacher: Text  # Hugging Face name, folder or run of a causal language model
        # forward: KL(teacher || student) (Hinton et al., 2015); reverse: KL(student || teacher); jensen_shannon: their
        # mean distance from a mixture
        divergence: Divergence = "forward"
        # weight of the teacher in the mixture of jensen_shannon (Agarwal et al., 2024, equation 1)
        beta: Fraction = 0.5
        temperature: PositiveFloat = 1.0  # divides all logits; the divergence is multiplied by its square
        cross_entropy: Fraction = 0.0  # weight of the labels' cross-entropy; the divergence has the rest
        weights: Literal["fp32", "bf16", "fp16"] = "fp32"  # dtype of the teacher

    options: Options
    fields: tuple[str, ...] = ("teacher",)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.head = Hidden()
        self.token_losses = self._divergence

    def attach(self, model: Model) -> None:
        super().attach(model)
        theirs = _built(self.options.teacher, torch.device("meta")).vocab_size
        if theirs != model.vocab_size:
            raise ConfigError(
                f"run.objective.teacher: it has {theirs} token IDs and the model has {model.vocab_size}; choose a "
                f"teacher with the same tokenizer"
            )

    @cached_property
    def teacher(self) -> LanguageModel:
        """The teacher, on the student's device; loaded in the first step, after the student's own weights."""
        return load_frozen(self.options.teacher, self.options.weights, next(self.model.parameters()).device)

    @torch.no_grad()
    def begin_step(self, step: Step, policy: Policy) -> Step:
        for micro in step:
            inputs = {key: value for key, value in micro.data.items() if key not in self.fields}
            micro.data = micro.data | {"teacher": self.head.hidden(self.teacher, inputs)}  # [rows, length, H]
        return step

    def _divergence(self, logits: Tensor, place: slice, batch: Batch) -> Tensor:
        """Token losses from the student's logits [n, vocab_size]; see `Objective.token_losses`."""
        hidden = batch["teacher"].to(logits.device).flatten(0, 1)[place]
        labels = batch["labels"].to(logits.device).flatten()[place]
        return _Divergence.apply(logits, hidden, labels, self.head, self.options)


class _Divergence(torch.autograd.Function):
    """Losses [n] of the student's logits [n, V], with a gradient that is computed for a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, hidden: Tensor, labels: Tensor, head: Hidden, options: Any) -> Tensor:
        losses, gradients = [], torch.empty_like(logits) if logits.requires_grad else None
        for start in range(0, len(logits), _ROWS):
            rows = slice(start, start + _ROWS)
            loss, gradient = _loss_and_gradient(logits[rows], head.of(hidden[rows]), labels[rows], options)
            losses.append(loss)
            if gradients is not None:
                gradients[rows] = gradient
        ctx.save_for_backward(gradients)
        return torch.cat(losses) if losses else logits.sum(1)

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return gradients * factors[:, None], None, None, None, None


def _loss_and_gradient(student: Tensor, teacher: Tensor, labels: Tensor, options: Any) -> tuple[Tensor, Tensor]:
    """Return the losses [n] and their gradients with respect to the student's logits [n, V]."""
    with torch.enable_grad():
        student = student.detach().requires_grad_()
        loss = divergence(student, teacher, options.divergence, options.temperature, options.beta)
        if options.cross_entropy:
            entropy = nn.functional.cross_entropy(student, labels, ignore_index=IGNORE_INDEX, reduction="none")
            loss = (1 - options.cross_entropy) * loss + options.cross_entropy * entropy
        (gradient,) = torch.autograd.grad(loss.sum(), student)
    return loss.detach(), gradient


def divergence(student: Tensor, teacher: Tensor, kind: Divergence, temperature: float, beta: float) -> Tensor:
    """Return the divergence [n] of distributions with logits [n, V], times the square of the temperature."""
    q, p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    if kind == "forward":
        terms = p.exp() * (p - q)
    elif kind == "reverse":
        terms = q.exp() * (q - p)
    else:
        mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()
        terms = beta * p.exp() * (p - mixture) + (1 - beta) * q.exp() * (q - mixture)
    return terms.sum(-1) * temperature**2


@registry.register_objective("on_policy_distill")
class OnPolicyDistill(Distill):
    """Distillation on completions that the student samples (Agarwal et al., 2024); by default with the reverse KL."""

    @dataclass
    class Options(RolloutOptions, Distill.Options):
        """Sampling of the student."""

        divergence: Divergence = "reverse"
        completions: PositiveInt = 1  # completions per prompt
        sampling_temperature: PositiveFloat = 1.0  # temperature of the student's samples

    options: Options
    row_layout = "prompts"
    fields = ("teacher", "answer", "sampled")

    def begin_step(self, step: Step, policy: Policy) -> Step:
        player, options = Player(self.options.max_new_tokens), self.options
        for micro in step:
            episodes = player.play(micro, policy, options.completions, options.sampling_temperature)
            self.record("length", torch.tensor([float(episode.length) for episode in episodes]))
            micro.data = batch_of(episodes, self.model.max_length)
        return super().begin_step(step, policy)
