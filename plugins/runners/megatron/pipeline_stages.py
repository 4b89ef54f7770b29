"""Pipeline stages: an unmodified model with stubs for the modules on other ranks.

Every stage runs the model's own forward, so masks and positions need no extra code. The stub of an embedding returns a
tensor that takes no memory. A hook before this stage's first block replaces it with the hidden states of the previous
stage.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from crosstrain import ConfigError, Ends, Head, Model

from .tensor_parallel import TensorParallel


class StubBlock(nn.Module):
    """Stub of a module of another stage: returns its input."""

    weight = bias = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class StubFirstBlock(StubBlock):
    """Stub of the first block; adds tokens to the key/value cache, because models read the number of tokens from it."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for cache in (*args, *kwargs.values()):
            if isinstance(cache, Cache):
                nothing = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)  # [batch, heads, length, width]
                cache.update(nothing, nothing, 0)
        return hidden


class StubEmbedding(nn.Module):
    """Stub of an embedding on the first stage; keeps the weight if this stage has a parameter tied to it."""

    def __init__(self, embedding: nn.Embedding, keep_weight: bool) -> None:
        super().__init__()
        self.width, self.dtype = embedding.embedding_dim, embedding.weight.dtype
        self.register_parameter("weight", embedding.weight if keep_weight else None)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.width)


class _WithLoss(torch.autograd.Function):
    """Identity on the hidden states; its backward also runs the backward of `loss`, multiplied by `weight`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.dtype = weight, loss.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, torch.full((), ctx.weight, dtype=ctx.dtype, device=grad.device), None


class StubHead(Head):
    """Stub of the head on all stages but the last: returns the hidden states, and records router losses."""

    def __init__(self, tensor: TensorParallel | None) -> None:
        self.tensor, self.weight, self.losses = tensor, 0.0, list[Tensor]()

    def add(self, result: Tensor, loss: Tensor) -> Tensor:
        self.losses.append(loss.detach().double())
        return _WithLoss.apply(result, loss, self.weight)

    def __call__(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden if self.tensor is None else self.tensor.taken(hidden)


def spread(blocks: int, stages: int, given: list[int] | None) -> list[range]:
    """Return the block indices of each stage; earlier stages get the remainder, because the last also has the head.

    given: number of blocks per stage; None: as even as possible. Raises ConfigError if there are fewer blocks than
    stages, or if `given` does not add up to `blocks`.
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
    """Return the modules before and after the model's blocks.

    Raises ConfigError, with the option `key` in its message, if the model does not define them.
    """
    ends = model.structure.ends()
    if ends is None:
        raise ConfigError(
            f"run.runner.{key}: {type(model).__name__} does not say what runs before and after its blocks, or its head "
            f"is more than a matrix product; leave {key} out"
        )
    return ends


def tied_names(model: Model, ends: Ends) -> set[str]:
    """Return the names of the parameters that both the first and the last stage use."""
    last = {id(p) for name in ends.last for p in model.get_submodule(name).parameters()}
    first = [module for name in ends.first for module in model.get_submodule(name).modules()]
    uses = {id(p) for module in first for p in module.parameters(recurse=False)}
    return {name for name, p in model.named_parameters() if id(p) in last & uses}


def stubs(
    model: Model, ends: Ends, here: Container[int], is_first: bool, is_last: bool, counts: bool
) -> dict[str, nn.Module]:
    """Return module name -> stub for the modules outside of one part of the model, except for existing stubs.

    here: indices of the blocks in the part. is_first: the part has the modules before the blocks. is_last: the part has
    the modules after the blocks. counts: the stub of the first block adds tokens to the key/value cache.
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
    """Replace modules by name, and return the replaced ones."""
    before = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        model.set_submodule(name, module)
    return before


def width_of(model: Model, ends: Ends) -> int:
    """Return the width of the hidden states."""
    modules = (module for name in ends.first for module in model.get_submodule(name).modules())
    return next(m.embedding_dim for m in modules if isinstance(m, nn.Embedding))
