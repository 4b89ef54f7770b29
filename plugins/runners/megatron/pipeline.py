"""Train with torch's pipeline schedules; evaluation runs one stage after the other."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from transformers import Cache

from crosstrain import PLAIN, Group, Head, Model, Timers

from .options import Options
from .pipeline_stages import StubHead, replace_modules
from .rng_tracker import RngTracker
from .schedules import make_schedule, rank_of
from .tensor_parallel import TensorParallel

Inputs = dict[str, Any]  # arguments of the model's forward


class Stage(nn.Module):
    """A stage of this rank for torch's schedules: the model, with stubs for this rank's other stages.

    Every rank of a pipeline reads the micro batch itself. Stages send hidden states [batch, length, width] in fp32,
    padded to the longest micro batch of the step, and the RNG state, so that dropout is the same as in one process.
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
        self.model, self.number, self.rng, self.autocast, self.timers = model, number, rng, autocast, timers
        self.is_first, self.is_last = number == 0, number == count - 1
        self.head = head if self.is_last else StubHead(tensor)
        self._stubs = stubs  # stubs for this rank's other stages, by module name
        self.received: Tensor | None = None
        self.length = 0  # sequence length of the hidden states sent between stages, including padding
        self.part = 1  # number of ranks that split the sequence between blocks
        self.batch: Callable[[int], Inputs]  # returns the micro batch with a given index, and seeds dropout for it
        self.before_backward: Callable[[bool], None]  # called before each backward; True: the step's last

    def forward(self, *received: Tensor, number: int) -> Tensor | tuple[Tensor, Tensor]:
        with self.timers("forward"):
            batch = self.batch(number)
            if not self.is_first:
                hidden, state = received
                self.received = hidden[:, : self.tokens(batch) // self.part]
                self.rng.set_state(state.cpu())
            out = self.compute(batch)
            if self.is_last:
                return out
            # The next stage always sends a gradient, so the output of a frozen stage must require one.
            out = out.float() if out.requires_grad else out.float().requires_grad_()
            out = nn.functional.pad(out, (0, 0, 0, self.length - out.shape[1]))
            return out, self.rng.state().to(out.device)

    def tokens(self, batch: Inputs) -> int:
        """Return the number of tokens per row on this context-parallel rank."""
        context, length = self.model.context, batch["input_ids"].shape[1]
        return length if context is None or "labels" not in batch else context.share(length)

    def compute(self, inputs: Inputs) -> Tensor:
        """Run the model's forward with stubs in place of this rank's other stages."""
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
    """torch's stage, except that it calls `before_backward` before each backward."""

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        stage: Any = self.submod
        stage.before_backward(last_backward)
        with stage.timers("backward"):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class Pipeline:
    """This rank's stages of a pipeline."""

    def __init__(self, stages: list[Stage], group: Group, options: Options, width: int, device: torch.device) -> None:
        self.stages, self.group, self.options, self.width, self.device = stages, group, options, width, device
        self.has_last = stages[-1].is_last
        self._schedules: dict[tuple[int, int, int], Any] = {}
        self._weight = 0.0

    def train(
        self,
        shape: tuple[int, int],
        count: int,
        batch: Callable[[int], Inputs],
        weight: float,
        last: Callable[[bool], None],
    ) -> Tensor:
        """Run forward and backward of `count` micro batches with hidden states of `shape` [batch, length].

        `batch(number)` returns a micro batch and seeds dropout for it. Losses are multiplied by `weight` before their
        backward. `last(is_last)` is called before each backward, with True for the last one of the step. Returns this
        rank's terms of the losses [count], float64: the last stage's losses, and router losses of other stages; empty
        if this rank has neither.
        """
        for stage in self.stages:
            stage.batch, stage.length, stage.before_backward = batch, shape[1], last
            if isinstance(stage.head, StubHead):
                stage.head.weight, stage.head.losses = weight, []
        self._weight = weight
        losses: list[Tensor] = []
        self._schedule(shape, count).step(
            arg_mbs=[()] * count,
            kwarg_mbs=[{"number": number} for number in range(count)],
            target_mbs=[None] * count if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        terms = [torch.stack(losses).detach().double() / weight] if losses else []
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
            name, loss = self.options.pipeline_schedule, lambda loss, _: loss * self._weight
            self._schedules[*shape, count] = make_schedule(name, stages, count, loss_fn=loss, scale_grads=False)
        return self._schedules[*shape, count]

    def evaluate(self, batch: Inputs) -> Tensor:
        """Return the model's output for a batch on every rank of the pipeline."""
        group, mine = self.group.process_group, {stage.number: stage for stage in self.stages}
        out = torch.empty(0, device=self.device)
        cache = batch.get("cache")
        # Models read the number of cached tokens from the first layer. All stages of this rank must see that number as
        # it is before the first of them runs.
        layers: list[Any] = cache.layers if isinstance(cache, Cache) else []
        found = [copy.copy(layer) for layer in layers[:1]]
        for number, stage in mine.items():
            kept = layers[:1]
            if stage is not self.stages[0]:
                layers[:1] = [copy.copy(layer) for layer in found]
            if not stage.is_first:
                stage.received = out
                if number - 1 not in mine:
                    shape = len(batch["input_ids"]), stage.tokens(batch), self.width
                    stage.received = torch.empty(shape, device=self.device)
                    dist.recv(stage.received, group=group, group_src=rank_of(number - 1, self.options))
            out = stage.compute(batch).float().contiguous()
            layers[:1] = kept
            if not stage.is_last and number + 1 not in mine:
                dist.send(out, group=group, group_dst=rank_of(number + 1, self.options))
        # The output is a loss or has values per row, so its shape is sent first.
        last = rank_of(self.options.stages - 1, self.options)
        extents = torch.tensor([out.ndim, *out.shape, *[0] * (3 - out.ndim)], device=self.device)
        dist.broadcast(extents, group=group, group_src=last)
        if not self.has_last:
            dims, *extent = extents.tolist()
            out = out.new_empty(extent[:dims])
        dist.broadcast(out, group=group, group_src=last)
        return out
