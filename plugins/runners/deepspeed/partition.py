"""What a rank holds under ZeRO: a contiguous range of each flattened parameter, found without any communication."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from crosstrain.optim import create_state


class Partition(Protocol):
    """A rank's part of the state. Tensors are flat, and `start` is the flat index in the parameter of their first."""

    def create_state(self) -> None: ...
    def start(self, parameter: nn.Parameter) -> int: ...
    def weight(self, parameter: nn.Parameter) -> Tensor: ...
    def state(self, parameter: nn.Parameter) -> dict[str, Any]: ...
    def gradient(self, parameter: nn.Parameter) -> Tensor | None: ...
    def loaded(self) -> None: ...


def _narrow(state: dict[str, Any], whole: Tensor, start: int, length: int) -> dict[str, Any]:
    """An optimizer's state of the flat tensor `whole`, cut to a range of it; scalars are everybody's."""
    return {
        key: value.narrow(0, start, length) if isinstance(value, Tensor) and value.shape == whole.shape else value
        for key, value in state.items()
    }


class Stage12:
    """Stages 1 and 2: parameters are whole everywhere, and each rank updates one range of every group, flattened.

    DeepSpeed links each parameter to its fragment (`_hp_mapping`, None where the range misses it).
    """

    def __init__(self, zero: Any) -> None:
        self.zero = zero

    def create_state(self) -> None:
        create_state(self.zero.optimizer)

    def start(self, parameter: nn.Parameter) -> int:
        mapping = getattr(parameter, "_hp_mapping", None)
        return mapping.lp_fragment_address.start if mapping else 0

    def weight(self, parameter: nn.Parameter) -> Tensor:
        if not parameter.requires_grad:
            return parameter.detach().flatten()  # frozen: whole, in place
        mapping = parameter._hp_mapping
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
        gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
        here = mapping.lp_fragment_address
        # With offloading a parameter that straddles two ranks' ranges may stand there whole.
        return gradient if gradient.numel() == here.numel else gradient.narrow(0, here.start, here.numel)

    def loaded(self) -> None:
        """Give every rank the whole parameters that the ranks' ranges make up."""
        self.zero.update_lp_params()


class Stage3:
    """Stage 3: each rank holds an equal range of every parameter, flattened and padded to a multiple of the ranks."""

    def __init__(self, zero: Any, optimizer: torch.optim.Optimizer | None) -> None:
        self.zero, self.optimizer = zero, optimizer

    def create_state(self) -> None:
        """Sub-group by sub-group, as DeepSpeed steps; those that live on NVMe are fetched for it."""
        zero, groups = self.zero, self.optimizer.param_groups
        for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
            swapped = zero._swappable_optimizer_subgroup(i)
            if swapped:
                zero._optimizer_states_and_gradient_swap_in(i)
            groups[zero.sub_group_to_group_id[i]]["params"] = [flat]
            create_state(self.optimizer)
            groups[zero.sub_group_to_group_id[i]]["params"] = []
            if swapped:
                zero._optimizer_states_and_gradient_swap_out(i)

    def start(self, parameter: nn.Parameter) -> int:
        return min(self._rank(parameter) * parameter.ds_tensor.ds_numel, parameter.ds_numel)

    def weight(self, parameter: nn.Parameter) -> Tensor:
        if self.optimizer is None or not parameter.requires_grad:
            return self._unpadded(parameter, parameter.ds_tensor.detach())
        return self._unpadded(parameter, self.zero._get_fp32_opt_state_partition(parameter, False)[0])

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        if self.optimizer is None or not parameter.requires_grad:
            return {}
        group, start, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
        flat = self.zero.fp32_partitioned_groups_flat[group]
        state = _narrow(self.optimizer.state[flat], flat, start, length)
        return {k: self._unpadded(parameter, v) if v.ndim else v for k, v in state.items() if isinstance(v, Tensor)}

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        local = self.zero.get_local_fp32_grad_for_param(parameter)
        return None if local is None else self._unpadded(parameter, local)

    def loaded(self) -> None:
        """Bring the partitions that compute up to date with the optimizer's, and gather what stays gathered."""
        zero = self.zero
        if self.optimizer is None:
            return
        zero._partition_all_parameters()
        for i in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(i)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    @staticmethod
    def _rank(parameter: nn.Parameter) -> int:
        return torch.distributed.get_rank(parameter.ds_process_group)

    def _unpadded(self, parameter: nn.Parameter, partition: Tensor) -> Tensor:
        return partition.flatten()[: max(0, parameter.ds_numel - self.start(parameter))]
