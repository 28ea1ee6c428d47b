"""States between the layout of the op's arguments and that of the scan, both ways."""

import torch
from torch import Tensor

from flaop.reference.activation import compute_dtype
from flaop.reference.packing import Packing


def initial_state(call, packing: Packing) -> Tensor:
    """``[N * HV, K, V]`` in the order of the rows; zeros without an initial state."""
    return _enter(call, packing, call.initial_state)


def final_state(call, packing: Packing, S: Tensor) -> Tensor:
    """``[N, HV, K, V]``, or ``[N, HV, V, K]`` with state_v_first."""
    return _leave(call, packing, S)


def final_state_gradient(call, packing: Packing, d_final_state: Tensor | None) -> Tensor:
    """``[N * HV, K, V]`` in the order of the rows; zeros when none arrives."""
    return _enter(call, packing, d_final_state)


def initial_state_gradient(call, packing: Packing, dS: Tensor) -> Tensor | None:
    """In the layout and dtype of the initial state; ``None`` without one."""
    if call.initial_state is None:
        return None
    return _leave(call, packing, dS).to(call.initial_state.dtype)


def _enter(call, packing: Packing, state: Tensor | None) -> Tensor:
    dtype = compute_dtype(call)
    if state is None:
        return torch.zeros(len(packing.order) * call.HV, call.K, call.V, dtype=dtype)
    if call.state_v_first:
        state = state.mT
    return packing.gather_state(state.to(dtype))


def _leave(call, packing: Packing, S: Tensor) -> Tensor:
    state = packing.scatter_state(S)
    return state.mT.contiguous() if call.state_v_first else state
