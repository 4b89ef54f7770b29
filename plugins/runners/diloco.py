"""DiLoCo: teams of ranks train apart, and exchange the changes of their weights every few steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from crosstrain import (
    Capabilities,
    Component,
    ConfigError,
    Fraction,
    Group,
    Layout,
    MakeOptimizer,
    Model,
    NonNegativeInt,
    OptionError,
    PlanContext,
    PositiveFloat,
    PositiveInt,
    Runner,
    RunOptions,
    Sizes,
    StepResult,
    registry,
)

_OWN, _SHARED, _MOMENTUM, _RESIDUAL, _MEAN = "own", "shared", "outer_momentum", "residual", "mean_change"
_ROW = 256  # values with one scale in int8


class Codec(NamedTuple):
    """A way to send fp32 values."""

    encode: Callable[[Tensor], Tensor]  # values [n] -> bytes
    decode: Callable[[Tensor, int], Tensor]  # (bytes, n) -> values [n]
    size: float  # bytes per value


def _encode_int8(values: Tensor) -> Tensor:
    rows = torch.nn.functional.pad(values, (0, -len(values) % _ROW)).view(-1, _ROW)
    scales = rows.abs().amax(1, keepdim=True) / 127
    whole = (rows / scales.clamp(min=torch.finfo().tiny)).round().to(torch.int8)
    return torch.cat([whole.flatten().view(torch.uint8), scales.flatten().view(torch.uint8)])


def _decode_int8(sent: Tensor, count: int) -> Tensor:
    rows = -(-count // _ROW)
    whole = sent[: rows * _ROW].view(torch.int8).view(rows, _ROW)
    return (whole * sent[rows * _ROW :].clone().view(torch.float32)[:, None]).flatten()[:count]


CODECS = {
    "fp32": Codec(lambda v: v.view(torch.uint8), lambda sent, _: sent.view(torch.float32), 4),
    "bf16": Codec(lambda v: v.bfloat16().view(torch.uint8), lambda sent, _: sent.view(torch.bfloat16).float(), 2),
    "int8": Codec(_encode_int8, _decode_int8, 1 + 4 / _ROW),
}


class Transfer(NamedTuple):
    """An exchange between the first ranks of the teams; the other ranks of a team have nothing to wait for."""

    work: dist.Work | None
    received: list[Tensor]  # bytes from each team


@registry.register_runner("diloco")
class DiLoCo(Runner):
    """Distributed low-communication training (Douillard et al., 2023), and its streaming form (Douillard et al., 2025).

    Each team trains with an inner runner. Every few steps, SGD with Nesterov momentum moves the shared weights by the
    mean of the teams' changes, weighted by their numbers of ranks, and each team continues from the shared weights.
    Checkpoints and validation use the mean of the teams' weights; checkpoints also keep each team's own.

    The class is combined with the class of the inner runner, whose options are `self.options`.
    """

    @dataclass
    class Options:
        """The teams, the outer optimizer and the exchange. Local SGD is outer_lr: 1 and outer_momentum: 0."""

        # runner of each team: ddp or fsdp
        inner: Annotated[Component, "runner"] = field(default_factory=lambda: Component("ddp"))
        groups: PositiveInt | list[PositiveInt] = 2  # number of teams of equal size, or the number of ranks of each
        # number of teams with which the run goes on after losses of ranks (run.on_lost_rank); None: all
        min_groups: PositiveInt | None = None
        every: PositiveInt = 50  # steps between exchanges
        outer_lr: PositiveFloat = 0.7  # learning rate of the outer SGD
        outer_momentum: Fraction = 0.9  # momentum of the outer SGD
        nesterov: bool = True  # Nesterov momentum
        # dtype of the exchanged changes; the error of rounding is added to the next change
        exchange: Literal["fp32", "bf16", "int8"] = "bf16"
        fragments: PositiveInt = 1  # parts of the model, exchanged in turn between two exchanges of the first part
        overlap: NonNegativeInt = 0  # steps that the teams take while an exchange is under way
        mixing: Fraction = 0.5  # share of a team's own weights after an exchange with overlap

        def __post_init__(self) -> None:
            for name in ("fragments", "overlap"):
                if getattr(self, name) > self.every - (name == "overlap"):
                    raise OptionError(name, f"{getattr(self, name)} does not fit into every={self.every} steps")

    capabilities: ClassVar = Capabilities(exact=False, extends="inner", rejoins=True)

    def __init__(self, options: Any, run: RunOptions) -> None:
        super().__init__(options.inner.options, run)
        self.outer: DiLoCo.Options = options
        self.codec = CODECS[options.exchange]
        self.state = {"steps": 0, "under_way": []}  # under_way: numbers of the fragments of unfinished exchanges
        self._transfers: dict[int, Transfer] = {}
        self._begun = self._is_merged = False

    # ---- teams

    @staticmethod
    def sizes(options: Any, world_size: int) -> list[int]:
        """Number of ranks of each team. Raises ConfigError if the teams do not fit the number of ranks."""
        groups = options.groups
        if isinstance(groups, int):
            groups = min(groups, max(world_size, options.min_groups or groups))
            if world_size % groups:
                raise ConfigError(f"run.runner.groups: {groups} does not divide the {world_size} ranks evenly")
            return [world_size // groups] * groups
        if sum(groups) != world_size:
            raise ConfigError(f"run.runner.groups: {groups} is {sum(groups)} ranks, but the run has {world_size}")
        return groups

    @classmethod
    def data_parallel_size(cls, options: Any, world_size: int) -> int:
        for size in cls.sizes(options, world_size):
            if super().data_parallel_size(options.inner.options, size) != size:
                raise ConfigError("run.runner.inner: the ranks of a team must have different samples")
        return world_size

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        super().check(options.inner.options, run)
        if options.overlap and run.on_lost_rank == "continue":
            raise ConfigError(
                "run.on_lost_rank: continue cannot take over an exchange that is under way; use restart, or "
                "run.runner.overlap=0"
            )

    @classmethod
    def check_model(cls, options: Any, run: RunOptions, model: Model) -> None:
        super().check_model(options.inner.options, run, model)

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        sizes = cls.sizes(options, at.world_size)
        layouts = super().layouts(options.inner.options, replace(at, world_size=max(sizes), replicas=max(sizes)))
        copies = 2 + (options.exchange != "fp32") + (options.overlap > 0)  # shared weights, momentum, residual, mean
        whole = Sizes.of(at.model).trainable_elements
        sent = int(whole * CODECS[options.exchange].size)
        for layout in layouts:
            layout.masters += 4 * layout.updated * copies
            layout.step_buffers += (4 * whole + sent * len(sizes)) // options.fragments
            layout.sent += sent * (len(sizes) - 1) // options.every
        return layouts

    def setup(self) -> None:
        super().setup()
        first, firsts = 0, list[int]()
        for number, size in enumerate(sizes := self.sizes(self.outer, self.world.size)):
            ranks = range(first, first + size)
            group = dist.new_group([*ranks]) if len(sizes) > 1 else None
            if group is not None and self.world.rank in ranks:
                self.team, self.team_number = Group(group), number
            firsts.append(first)
            first += size
        self.weights = [size / self.world.size for size in sizes]
        group = dist.new_group(firsts) if len(sizes) > 1 else None
        self.leaders = Group(group) if group is not None and self.world.rank in firsts else Group()

    # ---- steps

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        super().prepare(model, make_optimizer)
        if make_optimizer is None:
            return
        count, blocks = self.outer.fragments, model.blocks()
        number = {p: i % count for i, block in enumerate(blocks) for p in block.parameters()}
        trained = [p for p in model.weights.parameters().values() if p.requires_grad]
        self.fragments = [[p for p in trained if number.get(p, 0) == i] for i in range(count)]
        if not all(self.fragments):
            raise ConfigError(
                f"run.runner.fragments: {count} fragments need as many blocks with trained parameters, of {len(blocks)}"
            )
        sometimes = {_RESIDUAL: self.outer.exchange != "fp32", _MEAN: self.outer.overlap > 0}
        for kind in (_OWN, _SHARED, _MOMENTUM, *(kind for kind, is_held in sometimes.items() if is_held)):
            self.held.extra[kind] = {p: torch.zeros_like(self._weight(p)) for p in trained}
        self.held.equal = {"param", *(f"runner:{kind}" for kind in (_SHARED, _MOMENTUM, _MEAN))}

    def _weight(self, parameter: nn.Parameter) -> Tensor:
        return self.held.weight(parameter).detach()

    def loaded(self) -> None:
        super().loaded()
        own = self.held.extra.pop(_OWN, None)
        if own is not None and self.held.was_loaded(_OWN):
            self._set(own)

    def _set(self, weights: dict[nn.Parameter, Tensor]) -> None:
        with torch.no_grad():
            for p, weight in weights.items():
                self._weight(p).copy_(weight)
        super().loaded()

    def _begin(self) -> None:
        """Copy the model's weights to the shared weights before the first step, unless these were loaded."""
        if not self._begun and not (self.state["steps"] and self.held.was_loaded(_SHARED)):
            for p, shared in self.held.extra[_SHARED].items():
                shared.copy_(self._weight(p))
        self._begun = True

    @property
    def together(self) -> Group:
        return self.team if (self.state["steps"] + 1) % self.outer.every else self.world

    def optimizer_step(self, apply: bool = True) -> StepResult:
        self._begin()
        everyone = self.together is self.world
        result = super().optimizer_step(apply)
        self.state["steps"] += 1
        with self.timers("outer step"), torch.no_grad():
            for number in range(len(self.fragments)):
                since = (self.state["steps"] - number * self.outer.every // len(self.fragments)) % self.outer.every
                if since == 0:
                    self._send(number)
                if since == self.outer.overlap and number in self.state["under_way"]:
                    self._move(number)
        # The number of applied steps must be the same on all ranks.
        return StepResult(result.grad_norm, applied=result.applied or everyone)

    def _send(self, number: int) -> None:
        """Begin to exchange the changes of a fragment."""
        extra = self.held.extra
        changes = {p: extra[_SHARED][p] - self._weight(p) for p in self.fragments[number]}
        residual = extra.get(_RESIDUAL)
        if residual is not None:
            changes = {p: change + residual[p] for p, change in changes.items()}
        flat = _flat(changes)
        sent = self.codec.encode(flat)
        if residual is not None:
            for p, rounded in _unflat(self.codec.decode(sent, len(flat)), changes).items():
                residual[p].copy_(changes[p] - rounded)
        self._transfers[number] = self._transfer(sent)
        self.state["under_way"].append(number)

    def _transfer(self, sent: Tensor) -> Transfer:
        if self.leaders.process_group is None:
            return Transfer(None, [sent] if self.team.size == self.world.size else [])
        received = [torch.empty_like(sent) for _ in self.weights]
        return Transfer(dist.all_gather(received, sent, group=self.leaders.process_group, async_op=True), received)

    def _mean(self, transfer: Transfer, codec: Codec, like: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Wait for an exchange, and return this rank's part of the teams' mean. Collective within the team."""
        if transfer.work is not None:
            transfer.work.wait()
        count = sum(value.numel() for value in like.values())  # `numel` of a DTensor is that of the full tensor
        flat = torch.zeros(count, device=self.device)
        for weight, values in zip(self.weights, transfer.received, strict=False):
            flat.add_(codec.decode(values, count), alpha=weight)
        if self.team.process_group is not None and len(self.weights) > 1:
            dist.broadcast(flat, group=self.team.process_group, group_src=0)
        return _unflat(flat, like)

    def _arrive(self, number: int) -> dict[nn.Parameter, Tensor]:
        """Return the mean change of a fragment, from its exchange or from a checkpoint."""
        held = {p: self.held.extra[_SHARED][p] for p in self.fragments[number]}
        if (transfer := self._transfers.pop(number, None)) is None:
            return {p: self.held.extra[_MEAN][p] for p in held}
        return self._mean(transfer, self.codec, held)

    def _move(self, number: int) -> None:
        """Move the shared weights of a fragment, and continue from them."""
        outer, extra, moved = self.outer, self.held.extra, {}
        for p, change in self._arrive(number).items():
            momentum = extra[_MOMENTUM][p].mul_(outer.outer_momentum).add_(change)
            step = change.add(momentum, alpha=outer.outer_momentum) if outer.nesterov else momentum
            shared = extra[_SHARED][p].sub_(step, alpha=outer.outer_lr)
            mixing = outer.mixing if outer.overlap else 0.0
            moved[p] = shared + mixing * (self._weight(p) - shared) if mixing else shared
            if outer.overlap:
                extra[_MEAN][p].zero_()
        self._set(moved)
        self.state["under_way"].remove(number)

    # ---- the mean of the teams

    @contextmanager
    def merged(self) -> Iterator[None]:
        if self._is_merged or self.optimizer is None or len(self.weights) == 1:
            yield
            return
        self._begin()
        with torch.no_grad():
            for number in list(self._transfers):  # they are saved
                for p, change in self._arrive(number).items():
                    self.held.extra[_MEAN][p].copy_(change)
        self.held.keep(_OWN)
        self._is_merged = True
        try:  # the exchange raises an error if a rank was lost
            codec = CODECS["fp32"]
            for fragment in self.fragments:
                weights = {p: self._weight(p) for p in fragment}
                self._set(self._mean(self._transfer(codec.encode(_flat(weights))), codec, weights))
            yield
        finally:
            self._is_merged = False
            self._set(self.held.extra.pop(_OWN))


def _flat(tensors: dict[nn.Parameter, Tensor]) -> Tensor:
    """Gather tensors over the team, and return them as one fp32 vector. Collective if they are sharded."""
    whole = (t.full_tensor() if isinstance(t, DTensor) else t for t in tensors.values())
    return torch.cat([t.flatten().float() for t in whole])


def _unflat(flat: Tensor, like: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Return the parts of a vector in the shapes and placements of `like`."""
    out = {}
    for (p, t), part in zip(like.items(), flat.split([t.numel() for t in like.values()]), strict=True):
        whole = part.view(t.shape).to(t.dtype)
        if isinstance(t, DTensor):
            whole = distribute_tensor(whole, t.device_mesh, t.placements, src_data_rank=None)
        out[p] = whole
    return out
