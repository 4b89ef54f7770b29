"""Pipelines: a rank's stage is an unmodified model with stubs for the modules on other ranks.

Every stage runs the model's own forward, so masks and positions need no extra code. The stub of an embedding returns a
tensor that takes no memory. A hook before this stage's first block replaces that tensor with the hidden states of the
previous stage. In training, torch's schedules run the stages; in evaluation, the stages run one after the other.
"""

import copy
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from transformers import Cache

from crosstrain import PLAIN, ConfigError, Ends, Group, Head, Model, Timers

from .options import Options
from .rng_tracker import RngTracker
from .schedules import make_schedule
from .tensor_parallel import TensorParallel

Inputs = dict[str, Any]  # arguments of the model's forward


class StubBlock(nn.Module):
    """Stub of a module on a different stage: returns its input."""

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
    """Stub of the first stage's embedding; keeps the weight if this stage has a parameter tied to it."""

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
        raise ConfigError(f"run.runner.pipeline_layers: {given} are {sum(given)} blocks, but the model has {blocks}")
    return [range(sum(given[:stage]), sum(given[: stage + 1])) for stage in range(stages)]


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
        for number, block in enumerate(model.structure.decoder_blocks())
        if number not in here
    }
    for name in [] if is_first else ends.first:
        module = model.get_submodule(name)
        tied = isinstance(module, nn.Embedding) and id(module.weight) in kept
        found[name] = StubEmbedding(module, tied) if isinstance(module, nn.Embedding) else StubBlock()
    found |= {name: StubBlock() for name in ends.last if not is_last}
    return {n: stub for n, stub in found.items() if not isinstance(model.get_submodule(n), StubBlock | StubEmbedding)}


def replace_modules(model: Model, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Replace modules by name, and return the replaced modules."""
    before = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        model.set_submodule(name, module)
    return before


def width_of(model: Model, ends: Ends) -> int:
    """Return the width of the hidden states: that of the last embedding, because the first may be of images."""
    modules = (module for name in reversed(ends.first) for module in model.get_submodule(name).modules())
    return next(m.embedding_dim for m in modules if isinstance(m, nn.Embedding))


class Stage(nn.Module):
    """A stage of this rank for torch's schedules: the model, with stubs for this rank's other stages.

    Every rank of a pipeline reads the micro batch itself. A stage sends two tensors: hidden states [batch, length,
    width] in fp32, padded to the longest micro batch of the step, and the RNG state, so that dropout is the same as in
    one process.
    """

    def __init__(
        self,
        model: Model,
        number: int,
        count: int,
        stubs: dict[str, nn.Module],
        rng: RngTracker,
        tensor: TensorParallel | None,
        autocast: Callable[[], AbstractContextManager[Any]],
        timers: Timers,
        head: Head,
    ) -> None:
        super().__init__()
        self.model, self.number, self.rng, self.tensor = model, number, rng, tensor
        self.autocast, self.timers = autocast, timers
        self.is_first, self.is_last = number == 0, number == count - 1
        self.head = head if self.is_last else StubHead(tensor)
        self._stubs = stubs  # stubs for this rank's other stages, by module name
        self.received: Tensor | None = None
        self.length = 0  # sequence length of the hidden states sent between stages, including padding
        self.batch: Callable[[int], Inputs]  # returns the micro batch with a given index, and seeds dropout for it
        self.sync: Callable[[bool], AbstractContextManager[Any]]  # context manager of a backward; True: the last one

    def forward(self, *received: Tensor, number: int) -> Tensor | tuple[Tensor, Tensor]:
        with self.timers("forward"):
            batch = self.batch(number)
            if not self.is_first:
                hidden, state = received
                self.received = hidden[:, : self.tokens(batch)]
                self.rng.set_state(state.cpu())
            out = self.compute(batch)
            if self.is_last:
                return out
            # The next stage always sends a gradient, so the output of a frozen stage must require a gradient.
            out = out.float() if out.requires_grad else out.float().requires_grad_()
            out = nn.functional.pad(out, (0, 0, 0, self.length - out.shape[1]))
            return out, self.rng.state().to(out.device)

    def tokens(self, batch: Inputs) -> int:
        """Return the row length of the hidden states between this rank's blocks, in tokens."""
        context, length = self.model.context, batch["input_ids"].shape[1]
        if context is not None and "labels" in batch:
            length = context.share(length)
        return length // self.tensor.size if self.tensor is not None and self.tensor.splits_sequence else length

    def compute(self, inputs: Inputs) -> Tensor:
        """Run the model's forward, with stubs in place of the other stages on this rank."""
        before = replace_modules(self.model, self._stubs)
        try:
            with self.autocast():
                return self.model(**inputs | {"mode": replace(inputs.get("mode", PLAIN), head=self.head)})
        finally:
            replace_modules(self.model, before)
            self.received = None

    def take_received(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pre-hook of this stage's first block: replace the stubs' output with the received hidden states."""
        return (self.received, *inputs[1:])


class _TorchStage(PipelineStage):
    """torch's stage, except that each backward runs in the context manager `sync`."""

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        stage: Any = self.submod
        with stage.sync(last_backward), stage.timers("backward"):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class Pipeline:
    """This rank's stages of a pipeline."""

    def __init__(self, stages: list[Stage], group: Group, options: Options, width: int, device: torch.device) -> None:
        self.stages, self.group, self.options, self.width, self.device = stages, group, options, width, device
        self.has_last = stages[-1].is_last
        self._schedules: dict[tuple[int, int, int], Any] = {}
        self._weight = 0.0
        self._losses: list[Tensor] = []  # losses of a step's micro batches, on the last stage

    def train(
        self,
        shape: tuple[int, int],
        count: int,
        batch: Callable[[int], Inputs],
        weight: float,
        sync: Callable[[bool], AbstractContextManager[Any]],
    ) -> Tensor:
        """Run the forward and backward passes of `count` micro batches with hidden states of `shape` [batch, length].

        `batch(number)` returns a micro batch and seeds dropout for it. Losses are multiplied by `weight` before their
        backward. Each backward runs in the context manager `sync(is_last)`; True: the last backward of the step.
        Returns this rank's contributions to the losses, [count] in float64: the losses on the last stage, and router
        losses on the other stages. If this rank has neither, the tensor is empty.
        """
        for stage in self.stages:
            stage.batch, stage.length, stage.sync = batch, shape[1], sync
            if isinstance(stage.head, StubHead):
                stage.head.weight, stage.head.losses = weight, []
        self._weight, self._losses = weight, []
        self._schedule(shape, count).step(
            arg_mbs=[()] * count,
            kwarg_mbs=[{"number": number} for number in range(count)],
            target_mbs=[None] * count if self.has_last else None,
            return_outputs=False,
        )
        terms = [torch.stack(self._losses).double()] if self._losses else []
        terms += [torch.stack(s.head.losses) for s in self.stages if isinstance(s.head, StubHead) and s.head.losses]
        return sum(terms[1:], terms[0]) if terms else torch.empty(0, dtype=torch.float64)

    def _schedule(self, shape: tuple[int, int], count: int) -> Any:
        """Return torch's schedule for `count` micro batches, cached by shape because its buffers have a fixed size."""
        if (*shape, count) not in self._schedules:
            hidden = torch.empty(*shape, self.width, device="meta", requires_grad=True)
            between = hidden, self.stages[0].rng.state().to("meta")
            stages = [
                _TorchStage(
                    stage,
                    stage.number,
                    self.options.stages,
                    self.device,
                    input_args=() if stage.is_first else between,
                    output_args=hidden.new_empty(()) if stage.is_last else between,
                    group=self.group.process_group,
                )
                for stage in self.stages
            ]
            self._schedules[*shape, count] = make_schedule(
                self.options.pipeline_schedule, stages, count, loss_fn=self._weighted, scale_grads=False
            )
        return self._schedules[*shape, count]

    def _weighted(self, loss: Tensor, _: None) -> Tensor:
        self._losses.append(loss.detach())
        return loss * self._weight

    def evaluate(self, batch: Inputs) -> Tensor:
        """Compute the model's output for a batch, and return it on every rank of the pipeline."""
        group, mine = self.group.process_group, {stage.number: stage for stage in self.stages}
        out = torch.empty(0, device=self.device)
        cache = batch.get("cache")
        # Models read the number of cached tokens from the first layer. All stages of this rank must see the number as
        # it was before this rank's first stage ran.
        layers: list[Any] = cache.layers if isinstance(cache, Cache) else []
        found = [copy.copy(layer) for layer in layers[:1]]
        for number, stage in mine.items():
            kept = layers[:1]
            if stage is not self.stages[0]:
                layers[:1] = [copy.copy(layer) for layer in found]
            if not stage.is_first:
                stage.received = out
                if number - 1 not in mine:
                    received = len(batch["input_ids"]), stage.tokens(batch), self.width
                    stage.received = torch.empty(received, device=self.device)
                    dist.recv(stage.received, group=group, group_src=self.options.rank_of(number - 1))
            out = stage.compute(batch).float().contiguous()
            layers[:1] = kept
            if not stage.is_last and number + 1 not in mine:
                dist.send(out, group=group, group_dst=self.options.rank_of(number + 1))
        # Send the shape first: the output is a scalar loss, or has values per row.
        last = self.options.rank_of(self.options.stages - 1)
        shape = self.group.all_gather(out.shape)[last]
        if not self.has_last:
            out = out.new_empty(shape)
        dist.broadcast(out, group=group, group_src=last)
        return out
