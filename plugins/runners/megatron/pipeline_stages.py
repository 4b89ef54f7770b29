"""Pipeline stages: an unmodified model in which stubs replace the modules that lie on other ranks.

So every stage runs the model's own forward, which makes masks and positions itself. The stub of an embedding returns a
tensor without memory; before this stage's first block, a hook replaces it by what the previous stage has sent.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from crosstrain import ConfigError, Ends, Head, Model

from .tensor_parallel import TensorParallel


class StubBlock(nn.Module):
    """Stub of a module on another stage: returns its input."""

    weight = bias = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class StubFirstBlock(StubBlock):
    """Stub of the first block; it counts tokens in the key/value cache, because models read the count there."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for cache in (*args, *kwargs.values()):
            if isinstance(cache, Cache):
                nothing = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)  # [batch, heads, length, width]
                cache.update(nothing, nothing, 0)
        return hidden


class StubEmbedding(nn.Module):
    """Stub of an embedding on the first stage. It keeps a weight that is tied to one of this stage."""

    def __init__(self, embedding: nn.Embedding, keep_weight: bool) -> None:
        super().__init__()
        self.width, self.dtype = embedding.embedding_dim, embedding.weight.dtype
        self.register_parameter("weight", embedding.weight if keep_weight else None)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.width)


class _WithLoss(torch.autograd.Function):
    """The identity, whose backward begins that of a loss, too, with the weight that the last stage multiplies it by."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.dtype = weight, loss.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, torch.full((), ctx.weight, dtype=ctx.dtype, device=grad.device), None


class StubHead(Head):
    """Stub of the head on all stages but the last: returns the hidden states, and keeps other losses' values."""

    def __init__(self, tensor: TensorParallel | None) -> None:
        self.tensor, self.weight, self.losses = tensor, 0.0, list[Tensor]()

    def add(self, result: Tensor, loss: Tensor) -> Tensor:
        self.losses.append(loss.detach().double())
        return _WithLoss.apply(result, loss, self.weight)

    def __call__(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden if self.tensor is None else self.tensor.taken(hidden)


def spread(blocks: int, stages: int, given: list[int] | None) -> list[range]:
    """Blocks of each stage. Earlier stages get the remainder, because the last one also has the head.

    Raises ConfigError where blocks and stages do not match.
    """
    if given is None:
        if blocks < stages:
            raise ConfigError(f"run.runner.pipeline_parallel: {stages} stages are too many for {blocks} blocks")
        share, rest = divmod(blocks, stages)
        given = [share + (stage < rest) for stage in range(stages)]
    if sum(given) != blocks:
        raise ConfigError(f"run.runner.pipeline_layers: {given} are {sum(given)} blocks, and the model has {blocks}")
    starts = [sum(given[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, given, strict=True)]


def ends_of(model: Model, key: str) -> Ends:
    """The model's ends. Raises ConfigError, which names the option `key`, for a model that does not define them."""
    ends = model.structure.ends()
    if ends is None:
        raise ConfigError(
            f"run.runner.{key}: {type(model).__name__} does not say what runs before and after its blocks, or its head "
            f"is more than a matrix product; leave {key} out"
        )
    return ends


def tied_names(model: Model, ends: Ends) -> set[str]:
    """Names of the parameters that both the first and the last stage use."""
    last = {id(p) for name in ends.last for p in model.get_submodule(name).parameters()}
    first = [module for name in ends.first for module in model.get_submodule(name).modules()]
    uses = {id(p) for module in first for p in module.parameters(recurse=False)}
    return {name for name, p in model.named_parameters() if id(p) in last & uses}


def stubs(
    model: Model, ends: Ends, here: Container[int], is_first: bool, is_last: bool, counts: bool
) -> dict[str, nn.Module]:
    """Stubs, by name, for the modules outside of a part of the model with the blocks `here`, where there are none yet.

    is_first, is_last: this part has the modules before the blocks, and after them. counts: the first block's stub
    counts the tokens in a cache.
    """
    names = {id(module): name for name, module in model.named_modules()}
    kept = {id(p) for name in ends.last for p in model.get_submodule(name).parameters()} if is_last else set()
    found: dict[str, nn.Module] = {
        names[id(block)]: StubFirstBlock() if counts and number == 0 else StubBlock()
        for number, block in enumerate(model.blocks())
        if number not in here
    }
    for name in [] if is_first else ends.first:
        module = model.get_submodule(name)
        tied = isinstance(module, nn.Embedding) and id(module.weight) in kept
        found[name] = StubEmbedding(module, tied) if isinstance(module, nn.Embedding) else StubBlock()
    for name in [] if is_last else ends.last:
        found[name] = StubBlock()
    return {n: stub for n, stub in found.items() if not isinstance(model.get_submodule(n), StubBlock | StubEmbedding)}


def replace_modules(model: Model, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Put modules in the places of others, by name; returns those."""
    before = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        model.set_submodule(name, module)
    return before


def width_of(model: Model, ends: Ends) -> int:
    """Width of the hidden states."""
    modules = (module for name in ends.first for module in model.get_submodule(name).modules())
    return next(m.embedding_dim for m in modules if isinstance(m, nn.Embedding))
