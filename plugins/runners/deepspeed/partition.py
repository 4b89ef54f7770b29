"""A rank's state under ZeRO: a contiguous range of each flattened parameter, located without communication."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from crosstrain import HeldState, Piece, create_state, flat_range_pieces

if TYPE_CHECKING:
    from .runner import DeepSpeedRunner


class Partition(HeldState, ABC):
    """A rank's part of the state, as flat tensors, for one of DeepSpeed's optimizers."""

    runner: "DeepSpeedRunner"

    @property
    def zero(self) -> Any:
        """DeepSpeed's wrapper of the runner's optimizer; in evaluation, the object whose hooks gather parameters."""
        return self.runner.engine.optimizer

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    def pieces(self, parameter: nn.Parameter, held: Tensor, shape: torch.Size) -> list[Piece]:
        return flat_range_pieces(held, tuple(shape), self.start(parameter), tuple(self.full_shape(parameter)))

    @abstractmethod
    def start(self, parameter: nn.Parameter) -> int:
        """Return the flat index of the first element of this rank's range in a parameter."""

    @abstractmethod
    def create_state(self) -> None:
        """Allocate the optimizer state."""

    @abstractmethod
    def loaded(self) -> None:
        """Refresh everything that DeepSpeed derives from the ranges."""

    def begin_step(self) -> None:
        """Clear the last step's gradients if DeepSpeed does not."""

    def refused(self) -> None:
        """Restore gathered parameters after a step that was not applied."""


def _narrow(state: dict[str, Any], whole: Tensor, start: int, length: int) -> dict[str, Any]:
    """Return the optimizer state of a range of the flat tensor `whole`; scalars are kept."""
    return {
        key: value.narrow(0, start, length) if isinstance(value, Tensor) and value.shape == whole.shape else value
        for key, value in state.items()
    }


class Stage12(Partition):
    """Stages 1 and 2: every rank holds full parameters, and updates one range of every flattened parameter group.

    DeepSpeed links each parameter to its fragment (`_hp_mapping`; None outside the rank's range).
    """

    def create_state(self) -> None:
        create_state(self.zero.optimizer)

    def start(self, parameter: nn.Parameter) -> int:
        mapping = getattr(parameter, "_hp_mapping", None)
        return mapping.lp_fragment_address.start if mapping else 0

    def weight(self, parameter: nn.Parameter) -> Tensor:
        if not parameter.requires_grad:
            return parameter.detach().flatten()  # frozen parameters are not partitioned
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        return mapping.get_hp_fragment() if mapping else parameter.detach().flatten()[:0]

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return {}
        flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        address = mapping.hp_fragment_address
        return _narrow(self.zero.optimizer.state[flat], flat, address.start, address.numel)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()  # type: ignore[attr-defined]
        here = mapping.lp_fragment_address
        # With offloading, DeepSpeed may keep the full gradient of a parameter that is split between two ranks.
        return gradient if gradient.numel() == here.numel else gradient.narrow(0, here.start, here.numel)

    def loaded(self) -> None:
        """Gather the full parameters from the ranks' ranges."""
        self.zero.update_lp_params()


class Stage3(Partition):
    """Stage 3: every parameter is flattened, padded, and split into one range of equal size per rank.

    Trainable parameters are in the optimizer's flat groups. Frozen parameters, and all parameters in evaluation, have
    partitions of their own.
    """

    def create_state(self) -> None:
        for group in range(len(self.zero.fp32_partitioned_groups_flat)):
            self.create_group_state(group)

    def create_group_state(self, group: int) -> None:
        """Allocate one flat group's state as DeepSpeed's step does, with only this group in the optimizer."""
        optimizer = self.zero.optimizer
        seen = optimizer.param_groups[self.zero.sub_group_to_group_id[group]]
        seen["params"] = [self.zero.fp32_partitioned_groups_flat[group]]
        create_state(optimizer)
        seen["params"] = []

    def start(self, parameter: Any) -> int:
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        return min(rank * parameter.ds_tensor.ds_numel, parameter.ds_numel)

    def weight(self, parameter: nn.Parameter) -> Tensor:
        if self.runner.optimizer is None or not parameter.requires_grad:
            return self._unpadded(parameter, self.own_partition(parameter))
        group, start, length = self._place(parameter)
        return self._unpadded(parameter, self.flat(group)[0].detach().narrow(0, start, length))

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        if self.runner.optimizer is None or not parameter.requires_grad:
            return {}
        group, start, length = self._place(parameter)
        flat, state = self.flat(group)
        return {
            key: self._unpadded(parameter, value) if isinstance(value, Tensor) and value.ndim else value
            for key, value in _narrow(state, flat, start, length).items()
        }

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        local = self.zero.get_local_fp32_grad_for_param(parameter)
        return None if local is None else self._unpadded(parameter, local)

    def flat(self, group: int) -> tuple[Tensor, dict[str, Any]]:
        """Return a flat group and its optimizer state."""
        flat = self.zero.fp32_partitioned_groups_flat[group]
        return flat, self.zero.optimizer.state[flat]

    def own_partition(self, parameter: Any) -> Tensor:
        """Return this rank's partition of a parameter that is not in the optimizer."""
        return parameter.ds_tensor.detach()

    def begin_step(self) -> None:
        """Zero the last step's gradients: DeepSpeed overwrites only gradients of parameters that a micro batch uses."""
        self.zero.grad_partitions_flat_buffer.zero_()

    def refused(self) -> None:
        """Gather persistent parameters again, because DeepSpeed leaves them partitioned after a refused step."""
        if persistent := self.zero.persistent_parameters:
            persistent[0].all_gather(persistent)

    def loaded(self) -> None:
        """Copy the optimizer's parameters to the model's partitions, and gather persistent parameters."""
        if self.runner.optimizer is None:
            return
        self.zero._partition_all_parameters()
        for group in range(len(self.zero.fp32_partitioned_groups_flat)):
            self.bring_up_to_date(group)
        self.refused()

    def bring_up_to_date(self, group: int) -> None:
        self.zero._reassign_or_swap_out_partitioned_parameters(group)

    def _place(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        """Return (flat group, offset in the group, length) of this rank's partition of a trainable parameter."""
        return self.zero.grad_position[self.zero.get_param_id(parameter)]

    def _unpadded(self, parameter: Any, partition: Tensor) -> Tensor:
        return partition.flatten()[: max(0, parameter.ds_numel - self.start(parameter))]
