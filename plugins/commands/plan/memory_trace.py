"""Trace the memory of a forward and a backward with fake tensors, which have shapes but no values.

A tensor counts from its allocation until torch releases it, whether the model, autograd, autocast or
checkpointing holds it, so the trace works for any model. The traced operations are those of torch's CPU backend. For
a GPU, the trace assumes a fused attention kernel, and a loss that computes one softmax per chunk.

At most two of the equal blocks in a chain are traced. The first trace contains the first and the last block, and the
second trace contains only the first block. The difference between the traces is the cost of each further block.
"""

import copy
import logging
import weakref
from collections import defaultdict
from collections.abc import Hashable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from crosstrain import PLAIN, Batch, ForwardMode, Head, Model, Objective, RolloutOptions, takes_mode
from crosstrain.inference.cache import BLOCK
from crosstrain.modeling import activation_checkpointing
from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.modeling.cross_entropy import CPU_SOFTMAX_ROWS

from ...models.hugging_face import cpu_attention
from .calls import sent_by

# torch has no FLOP formulas for CPU attention or for addmm_, which accumulates the head's gradient in place.
_FLOPS = flop_registry | {
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
}


@dataclass
class Trace:
    """Bytes and FLOPs of one micro batch; memory excludes parameters and their gradients."""

    forward_peak: int = 0
    kept: int = 0  # bytes held between forward and backward
    # (gradient bytes so far in blocks, gradient bytes so far in the whole model) -> peak memory
    backward: dict[tuple[int, int], int] = field(default_factory=dict)
    inputs: int = 0  # bytes of inputs of checkpointed blocks, which `offload` moves to host memory
    flops: int = 0
    exchanged: int = 0  # bytes that this rank sends in collectives of the forward and the backward
    cache: int = 0  # bytes of keys and values while the completions of a micro batch are sampled

    def peak(self, retained: float, outside: float, exchanged: int) -> tuple[int, int, int]:
        """Return the peak memory, and its parts for retained gradients and for communication buffers.

        retained: fraction of the blocks' gradients that stays in memory. outside: the same fraction for all other
        gradients. exchanged: bytes of communication buffers, which exist once the backward has produced a gradient.
        """
        moments = [(self.forward_peak, 0, 0)]
        for (inside, made), most in self.backward.items():
            stay, sent = int(retained * inside + outside * (made - inside)), exchanged if made else 0
            moments.append((most + stay + sent, stay, sent))
        return max(moments)


def trace(
    model: Model,
    batch: Batch,
    dtype: torch.dtype,
    mode: Mode,
    device: str,
    head: Head | None = None,
    objective: Objective | None = None,
) -> Trace:
    """Trace a forward and a backward of `model`, which is on the meta device, with autocast to `dtype`.

    batch: tensors of a micro batch; only their shapes and dtypes matter. head: this rank's head; None: the plain head.
    objective: the loss; None: the model's own loss. Raises the model's error if the forward reads tensor values.
    """
    groups = {n: alike for n, chain in enumerate(model.structure.chains()) if len(alike := _alike(chain)) > 2}
    middles = {n: alike[1:-1] for n, alike in groups.items()}
    measure = partial(_measure, model, batch, dtype, mode, device, head or Head(), objective or Objective(None))
    ends = measure(middles)
    out = ends.trace
    # Walk the backward from its end, so that insertions do not shift the boundaries still to come.
    for n in sorted(groups, key=lambda n: -ends.boundaries.get(n, (0, 0))[1]):
        out = _extended(out, ends, measure(middles | {n: groups[n][1:]}), n, len(middles[n]))
    return out


def cache_bytes(model: Model, head: Head | None, dtype: torch.dtype, prompt: int, options: RolloutOptions) -> int:
    """Return the bytes of the key/value cache of a prompt's completions in their last turn, measured in a forward.

    The cache has room for the prompt, for earlier turns, and for whole blocks of new tokens; the last token is not
    computed again. model: this rank's part, on the meta device.
    """
    # Under sequence parallelism, the number of ranks divides the number of tokens in a forward.
    room = prompt + options.max_new_tokens * (options.turns - 1) + BLOCK * -(-(options.max_new_tokens - 1) // BLOCK)
    model, mode = copy.deepcopy(model).eval(), ForwardMode(head or Head()).arguments() if takes_mode(model) else {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        _give_shapes(model, [])
        if (cache := model.new_cache()) is None:
            return 0
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model(input_ids=torch.zeros(1, whole := -(-room // BLOCK) * BLOCK, dtype=torch.int64), cache=cache, **mode)
    held = [t.untyped_storage() for layer in cache.layers for t in tree_leaves(vars(layer)) if isinstance(t, Tensor)]
    return options.completions * sum({storage._cdata: storage.nbytes() for storage in held}.values()) * room // whole


def _alike(chain: list[nn.Module]) -> list[nn.Module]:
    """Return the largest set of equal blocks. A block without parameters equals no other block."""

    kinds = defaultdict[Hashable, list[nn.Module]](list)
    for block in chain:
        if shapes := [(n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()]:
            kinds[type(block), *shapes].append(block)
    return max(kinds.values(), key=len, default=[])


def _extended(out: Trace, ends: "_Tracker", one: "_Tracker", chain: int, more: int) -> Trace:
    """Return `out` with `more` blocks in the middle of a chain; each costs the difference between `ends` and `one`."""
    a, b = ends.trace, one.trace
    in_forward, in_backward = ends.forward_end - one.forward_end, a.kept - b.kept
    gradients = max(a.backward)[1] - max(b.backward)[1]
    boundary = ends.boundaries.get(chain)
    backward: dict[tuple[int, int], int] = {}
    for (inside, made), most in out.backward.items():
        later = inside + more * gradients, made + more * gradients  # unchanged if the blocks are frozen
        if boundary is not None and made >= boundary[1]:
            backward[later] = max(most, backward.get(later, 0))
        if boundary is None or made <= boundary[1]:  # the boundary itself counts on both sides
            backward[inside, made] = max(most + more * in_backward, backward.get((inside, made), 0))
    return Trace(
        forward_peak=out.forward_peak + more * in_forward,
        kept=out.kept + more * in_backward,
        backward=backward,
        inputs=out.inputs + more * (a.inputs - b.inputs),
        flops=out.flops + more * (a.flops - b.flops),
        exchanged=out.exchanged + more * (a.exchanged - b.exchanged),
    )


def _measure(
    model: Model,
    batch: Batch,
    dtype: torch.dtype,
    mode: Mode,
    device: str,
    head: Head,
    objective: Objective,
    left_out: dict[int, list[nn.Module]],
) -> "_Tracker":
    absent = [block for blocks in left_out.values() for block in blocks]
    model = copy.deepcopy(model, {id(block): block for block in absent})
    model.train()
    tracker = _Tracker()
    for blocks, how in model.structure.checkpointing(mode):
        here = [block for block in blocks if block not in absent]
        activation_checkpointing.apply(here, "full" if how == "offload" else how, nullcontext)
        for block in here:
            # A block without parameters is a placeholder for a block on a different pipeline stage.
            if how in ("full", "offload") and next(block.parameters(), None) is not None:
                block.register_forward_pre_hook(tracker.sees_input)
    with ExitStack() as stack:
        # This logger would print a stack trace for an error that is raised anyway.
        stack.enter_context(patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(nn.functional, "grouped_mm", _grouped_mm))
        if device == "cuda":
            attend = nn.functional.scaled_dot_product_attention
            stack.enter_context(
                # GPU kernels fuse dropout, and the CPU kernel does not support it.
                patch.object(
                    nn.functional,
                    "scaled_dot_product_attention",
                    lambda *args, dropout_p=0.0, **kwargs: attend(*args, **kwargs),
                )
            )
            stack.enter_context(patch.object(cpu_attention, "on_cpu", lambda _: False))
        for chain, blocks in left_out.items():  # the copy shares these blocks with the model
            for block in blocks:
                stack.enter_context(patch.object(block, "forward", partial(_pass_on, tracker, chain)))
        _give_shapes(model, absent)
        inputs = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in batch.items()}
        ignored = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *inputs.values())]
        tracker.counted.update(map(id, ignored))
        inside = {id(p) for block in model.blocks() for p in block.parameters()}
        for p in model.parameters():
            if p.requires_grad and p.device.type != "meta":
                p.register_post_accumulate_grad_hook(partial(tracker.takes_gradient, id(p) in inside))
        rows = CPU_SOFTMAX_ROWS if device == "cpu" else 1 << 30
        forward = ForwardMode(head, traced_rows=rows) if takes_mode(model) else PLAIN
        stack.enter_context(tracker)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = model(**objective.inputs(inputs, forward))
            tracker.forward_end = tracker.live
        tracker.ends_forward()
        if out.requires_grad:  # False on a stage without trained parameters
            out.backward(torch.empty_like(out) if out.ndim else None)
    return tracker


def _pass_on(tracker: "_Tracker", chain: int, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """Replace the forward of a left-out block; a hook records when the backward reaches the block."""
    if hidden.requires_grad:
        hidden.register_hook(lambda _: tracker.comes_by(chain))
    return hidden


def _grouped_mm(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """Replace torch's grouped_mm, which accepts only bf16 fake tensors: multiply all rows by `weights[0]`.

    Shapes, memory and FLOPs are as in the real operation, which multiplies each group of rows [n, in] by its own
    weight [in, out].
    """
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ weights[0]


def _give_shapes(model: Model, left_out: list[nn.Module]) -> None:
    """Replace parameters and buffers with tensors of the current fake mode, except in the blocks of `left_out`."""
    skipped = {id(module) for block in left_out for module in block.modules()}
    made: dict[Tensor, Any] = {}  # a tied parameter is replaced once
    for module in (module for module in model.modules() if id(module) not in skipped):
        for home in (module._parameters, module._buffers):
            for name, old in home.items():
                if old is not None and old not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                home[name] = None if old is None else made[old]


class _Tracker(TorchDispatchMode):
    """Counts the bytes of live tensors, FLOPs, and bytes sent."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.live = 0
        self.forward_end = 0  # live bytes at the end of the forward, including autocast's copies of weights
        # chain -> value of `_made` when the backward reaches the chain's left-out blocks
        self.boundaries: dict[int, tuple[int, int]] = {}
        self._made = (0, 0)  # gradient bytes so far: in blocks, in the whole model
        self.counted: set[int] = set()  # IDs of the storages that are counted, or that do not count
        self._backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return out
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):  # the local tensor is counted instead
                self._count(tensor)
        if formula := _FLOPS.get(func._overloadpacket):
            self.trace.flops += formula(*args, **kwargs, out_val=out)
        self.trace.exchanged += sent_by(func, args, out)
        if self._backward:
            # Real gradients accumulate in place, unlike fake gradients: skip the sum and measure at the next operation.
            if func is not torch.ops.aten.add.Tensor:
                self.trace.backward[self._made] = max(self.trace.backward.get(self._made, 0), self.live)
        else:
            self.trace.forward_peak = max(self.trace.forward_peak, self.live)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.counted:
            self.counted.add(id(storage))
            self.live += storage.nbytes()
            weakref.finalize(storage, self._forget, id(storage), storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self.counted.discard(key)
        self.live -= size

    # ---- phases

    def ends_forward(self) -> None:
        self.trace.kept, self._backward = self.live, True
        self.trace.backward[self._made] = self.live

    def takes_gradient(self, in_block: bool, parameter: Tensor) -> None:
        assert parameter.grad is not None
        size = parameter.grad.numel() * parameter.grad.element_size()
        self._made = self._made[0] + (size if in_block else 0), self._made[1] + size
        parameter.grad = None
        self.trace.backward[self._made] = self.live

    def comes_by(self, chain: int) -> None:
        self.boundaries.setdefault(chain, self._made)

    def sees_input(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._backward and torch.is_grad_enabled() and isinstance(args[0], Tensor):
            self.trace.inputs += args[0].numel() * args[0].element_size() if args[0].requires_grad else 0
