"""Run micro batches through pipeline stages by torch's schedules; evaluation runs one stage after the other."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from crosstrain import Batch, Group, Model, Timers

from .pipeline_stages import StubHead
from .rng_tracker import RngTracker


class Stage(nn.Module):
    """This rank's stage as torch's schedules call it.

    Every rank of a pipeline reads the micro batch itself. Between stages go hidden states [batch, length, width] in
    fp32, padded to the longest micro batch of the step, and the state of the generator of random numbers, so that
    dropout is that of one process.
    """

    def __init__(
        self,
        model: Model,
        group: Group,
        rng: RngTracker,
        autocast: Callable[[], AbstractContextManager[Any]],
        timers: Timers,
    ) -> None:
        super().__init__()
        self.model, self.group, self.rng, self.autocast, self.timers = model, group, rng, autocast, timers
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1
        self.received: Tensor | None = None
        self.length = 0  # of what goes between stages
        self.part = 1  # ranks that share a sequence between blocks
        self.batch: Callable[[int], Batch]  # the micro batch of a number; on the first stage, seeds for it

    def forward(self, *received: Tensor, number: int) -> Tensor | tuple[Tensor, Tensor]:
        with self.timers("forward"):
            batch = self.batch(number)
            if not self.is_first:
                hidden, state = received
                self.received = hidden[:, : self.tokens(batch) // self.part]
                self.rng.set_state(state.cpu())
            with self.autocast():
                out = self.model(**batch)
            self.received = None
            if self.is_last:
                return out
            # Frozen stages hand on what the next stage, as of any other, sends a gradient for.
            out = out.float() if out.requires_grad else out.float().requires_grad_()
            out = nn.functional.pad(out, (0, 0, 0, self.length - out.shape[1]))
            return out, self.rng.state().to(out.device)

    def tokens(self, batch: Batch) -> int:
        """Tokens of a row that the ranks of this stage that share blocks compute."""
        context, length = self.model.context, batch["input_ids"].shape[1]
        return length if context is None or "labels" not in batch else context.share(length)

    def take_received(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hook before this stage's first block: replace the stubs' output by the received hidden states."""
        return (self.received, *inputs[1:])


class _TorchStage(PipelineStage):
    """torch's stage with a callback before each backward, told if it is the step's last."""

    before_backward: Callable[[bool], None]
    timers: Timers

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        self.before_backward(last_backward)
        with self.timers("backward"):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class Pipeline:
    """The stages of one pipeline, seen from this rank's."""

    def __init__(self, stage: Stage, schedule: str, width: int, device: torch.device) -> None:
        self.stage, self.schedule_name, self.width, self.device = stage, schedule, width, device
        self.group = stage.group
        self._schedules: dict[tuple[int, int, int], Any] = {}
        self._weight = 0.0

    def train(
        self,
        shape: tuple[int, int],
        count: int,
        batch: Callable[[int], Batch],
        weight: float,
        last: Callable[[bool], None],
    ) -> Tensor:
        """Forward and backward of `count` micro batches with hidden states of `shape` [batch, length].

        `batch(number)` gives a micro batch, and on the first stage seeds for it. Losses are multiplied by `weight`
        before their backward; `last` is told before each whether it is the step's last. Returns this stage's terms of
        the losses [count], float64: the last one's, and those of routers elsewhere; empty if there are none.
        """
        head = self.stage.model.head
        if isinstance(head, StubHead):
            head.weight, head.losses = weight, []
        self.stage.batch, self.stage.length, self._weight = batch, shape[1], weight
        schedule = self._schedule(shape, count)
        schedule._stage.before_backward = last
        losses: list[Tensor] = []
        schedule.step(
            arg_mbs=[()] * count,
            kwarg_mbs=[{"number": number} for number in range(count)],
            target_mbs=[None] * count if self.stage.is_last else None,
            losses=losses if self.stage.is_last else None,
            return_outputs=False,
        )
        if isinstance(head, StubHead):
            return torch.stack(head.losses) if head.losses else torch.empty(0, dtype=torch.float64)
        return torch.stack(losses).detach().double() / weight

    def _schedule(self, shape: tuple[int, int], count: int) -> Any:
        """torch's schedule for `count` micro batches; its buffers are made for one shape."""
        if (*shape, count) not in self._schedules:
            hidden = torch.empty(*shape, self.width, device="meta", requires_grad=True)
            between = hidden, self.stage.rng.state().to("meta")
            stage = _TorchStage(
                self.stage, self.group.rank, self.group.size, self.device,
                input_args=() if self.stage.is_first else between,
                output_args=hidden.new_empty(()) if self.stage.is_last else between,
                group=self.group.process_group,
            )  # fmt: skip
            stage.timers = self.stage.timers
            # With fewer micro batches than stages 1F1B is GPipe, and torch's takes no fewer.
            one_f_one_b = self.schedule_name == "1f1b" and count >= self.group.size
            kind = Schedule1F1B if one_f_one_b else ScheduleGPipe
            schedule = kind(stage, count, loss_fn=lambda loss, _: loss * self._weight, scale_grads=False)
            self._schedules[(*shape, count)] = schedule
        return self._schedules[(*shape, count)]

    def evaluate(self, batch: Batch) -> Tensor:
        """The model's output for a batch, on every rank of the pipeline."""
        stage, group, rank = self.stage, self.group.process_group, self.group.rank
        if not stage.is_first:
            shape = len(batch["input_ids"]), stage.tokens(batch), self.width
            stage.received = torch.empty(shape, device=self.device)
            dist.recv(stage.received, group=group, group_src=rank - 1)
        with stage.autocast():
            out = stage.model(**batch).float().contiguous()
        stage.received = None
        if not stage.is_last:
            dist.send(out, group=group, group_dst=rank + 1)
        # A loss, or numbers of each row.
        extents = torch.tensor([out.ndim, *out.shape, *[0] * (3 - out.ndim)], device=self.device)
        dist.broadcast(extents, group=group, group_src=self.group.size - 1)
        if not stage.is_last:
            dims, *extent = extents.tolist()
            out = out.new_empty(extent[:dims])
        dist.broadcast(out, group=group, group_src=self.group.size - 1)
        return out
