"""Router losses and expert loads of a mixture of experts, computed over the target tokens of a step.

The balance loss of a layer with E experts is E sum_e f_e P_e (Fedus et al., 2021, equation 4). f_e is the number of
tokens routed to expert e, divided by the number of tokens. P_e is the mean probability of expert e over the same
tokens. With perfect balance, the loss is k, the number of experts per token, as in transformers.

A product of two means is not a sum over tokens, so the balance loss depends on the set of tokens in the means. If this
set is the targets of one document (DeepSeek-AI, 2024, section 2.1.3), the loss does not depend on the batch layout.

All router losses are means over layers and documents, and each document is weighted by its number of targets. Router
losses can therefore be added up over micro batches and ranks, like token losses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crosstrain.modeling.context import Context
from crosstrain.utils.types import IGNORE_INDEX

# Tokens over which a balance loss is computed. sequence: a document; micro_batch: a micro batch on one rank.
Scope = Literal["sequence", "micro_batch", "none"]

Choices = dict[int, tuple[Tensor, Tensor]]  # layer -> logits [tokens, E] and chosen experts [tokens, k]

BIAS = "e_score_correction_bias"  # sigmoid routers' buffer that affects only the choice of experts (Wang et al., 2024)


class Documents(Protocol):
    """The documents in packed rows. A model masks attention between documents."""

    starts: list[int]  # start of each document in the flattened rows, then the total number of tokens
    context: Context | None  # ranks that each take a part of every row; None: no context parallelism

    def numbers(self) -> Tensor:
        """Return the index of each token's document, counted from 1."""


def _sums_of_layer(
    logits: Tensor, chosen: Tensor, sigmoid: bool, weight: Tensor, owner: Tensor, owners: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a layer's sums over targets: choices and probabilities [documents, E], total z loss and entropy.

    logits: [tokens, E]. chosen: [tokens, k], experts. weight: [tokens], 1 for targets, else 0. owner: [tokens],
    document indices; there are `owners` documents.
    """
    logits = logits.float()
    experts = logits.shape[-1]
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    p = (scores / scores.sum(-1, keepdim=True) if sigmoid else scores) * weight[:, None]
    places = (owner[:, None] * experts + chosen).flatten()
    choices = weight.new_zeros(owners * experts).index_add(0, places, weight.repeat_interleave(chosen.shape[1]))
    mass = p.new_zeros(owners, experts).index_add(0, owner, p)
    z = (logits.logsumexp(-1).square() * weight).sum()
    return choices.view(owners, experts), mass, z, -torch.xlogy(p.detach(), p.detach()).sum()


@dataclass
class Routers:
    """The routers of a model, watched by hooks.

    Each router returns logits [tokens, E], expert weights [tokens, k] and expert indices [tokens, k].
    """

    modules: list[nn.Module]  # routers of all layers; routers of other pipeline stages are never called
    scope: Scope
    coefficient: float  # factor of the balance loss; must be 0 if `scope` is none
    z_coefficient: float  # factor of the mean squared log-sum-exp of the logits (Zoph et al., 2022, equation 5)
    bias_rate: float  # amount by which an expert's bias changes per step
    record: Callable[..., None]  # `Model.record`
    record_load: Callable[[str, Tensor], None]  # `Model.record_load`
    parts: Context | None = None  # ranks that each route a part of every sequence; set by a runner
    observe: Callable[[Choices], None] | None = None  # called with the choices of each micro batch
    _seen: Choices | None = field(default=None, init=False)
    _choices: Tensor | None = field(default=None, init=False)  # counts since the start of the step [layers, E], fp64

    def __post_init__(self) -> None:
        for number, module in enumerate(self.modules):
            module.register_forward_hook(partial(self._watch, number))  # partial gives a copied model its own hooks

    @property
    def has_loss(self) -> bool:
        return self.coefficient != 0 or self.z_coefficient != 0

    def added(self, means: Mapping[str, float]) -> float:
        """Return the sum of the router losses, each times its coefficient. means: name -> recorded mean."""
        balance, z = (means.get(name, 0.0) for name in ("load_balancing_loss", "router_z_loss"))
        return self.coefficient * balance + self.z_coefficient * z

    def begin(self) -> None:
        """Watch the routers until `loss` is called."""
        self._seen = {}

    def _watch(self, number: int, _module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
        # Gradient checkpointing calls routers again without `begin`, and would repeat any computation done here.
        if self._seen is not None:
            self._seen[number] = output[0], output[2]

    def loss(self, labels: Tensor, documents: Documents | None) -> Tensor:
        """Return the router losses since `begin`, as a scalar to add to the sum of the targets' losses.

        labels: [batch, length].

        If ranks share sequences (`parts` or the documents' context), every rank returns the loss of whole sequences,
        with the gradients of its own part.
        """
        seen, self._seen = self._seen or {}, None
        weight, owner, owners = self._tokens(labels, documents)
        here = sorted(seen)
        if not here:  # this pipeline stage has no experts
            return weight.new_zeros(())
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.has_loss):
            parts = [_sums_of_layer(*seen[n], hasattr(self.modules[n], BIAS), weight, owner, owners) for n in here]
        choices, mass, z, entropy = (torch.stack(each) for each in zip(*parts, strict=True))
        self.record_load("expert_load", self._count(here, choices.sum(1)))
        if self.observe is not None:
            self.observe(seen)
        targets, sizes = weight.sum(), weight.new_zeros(owners).index_add(0, owner, weight)
        context = None if documents is None else documents.context
        sharing = [ranks.group for ranks in (self.parts, context) if ranks is not None]
        for group in sharing:
            dist.all_reduce(choices, group=group)
            dist.all_reduce(sizes, group=group)
        share = choices / sizes.clamp(min=1)[:, None]  # f
        balance = share.shape[-1] * (share * mass).sum((1, 2))  # per layer, summed over targets
        for name, sums in (("load_balancing_loss", balance), ("router_z_loss", z), ("router_entropy", entropy)):
            if name != "router_z_loss" or self.z_coefficient:
                self.record(name, sums / targets.clamp(min=1), targets.expand_as(sums))
        loss = (self.coefficient * balance + self.z_coefficient * z).sum() / len(self.modules)
        whole = loss.detach().clone()
        for group in sharing:
            dist.all_reduce(whole, group=group)
        return loss + (whole - loss.detach())

    def _tokens(self, labels: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor, int]:
        """Return a target mask and document indices for the tokens routed on this rank, and the number of documents."""
        target = labels != IGNORE_INDEX
        if self.scope != "sequence":
            owner, owners = torch.zeros_like(labels), 1
        elif documents is None:
            owner, owners = torch.arange(len(labels), device=labels.device)[:, None].expand_as(labels), len(labels)
        else:
            owner, owners = documents.numbers().to(labels.device) - 1, len(documents.starts) - 1
            owner = owner if documents.context is None else documents.context.part(owner)
        if self.parts is not None:
            target, owner = self.parts.part(target), self.parts.part(owner)
        return target.float().flatten(), owner.flatten(), owners

    def _count(self, here: list[int], choices: Tensor) -> Tensor:
        """Add a micro batch's counts of choices [layers on this rank, E] to the step's counts.

        Returns the micro batch's counts as [layers, E], with 0 for layers on other ranks.
        """
        every = choices.new_zeros(len(self.modules), choices.shape[1], dtype=torch.float64)
        every[here] = choices.double()
        self._choices = every if self._choices is None else self._choices + every
        return every

    def end_step(self, ranks: dist.ProcessGroup | None, applied: bool) -> None:
        """Update the experts' biases from the choices on all ranks (Wang et al., 2024, algorithm 1).

        The biases are not updated if the optimizer step was skipped (`applied` is False).
        """
        choices, self._choices = self._choices, None
        if choices is None or not self.bias_rate or not any(BIAS in module._buffers for module in self.modules):
            return
        if ranks is not None:
            dist.all_reduce(choices, group=ranks)
        if applied:
            for module, made in zip(self.modules, choices, strict=True):
                module.get_buffer(BIAS).add_((made.mean() - made).sign() * self.bias_rate)
