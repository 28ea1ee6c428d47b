"""What the kernels and fakes of the families share. A `call` is the checked call of a family."""

from contextlib import nullcontext

import torch
from torch import Tensor


def device_guard(q: Tensor):
    """Kernels run on q's device, whichever is current."""
    if q.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(q.device)


def is_empty(call) -> bool:
    """No token or no sequence: nothing to launch."""
    return call.T == 0 or call.B == 0 or call.N == 0


# Allocation of what the ops return, for the fakes and for empty calls.


def new_output(call) -> Tensor:
    return call.v.new_empty((call.B, call.T, call.HV, call.V))


def new_state(call) -> Tensor:
    shape = call.state_shape if call.output_final_state else (0,)
    return call.q.new_empty(shape, dtype=call.state_dtype)


def new_gradients(call, inputs: tuple[Tensor | None, ...], grad_mask) -> list[Tensor]:
    """`inputs` are the differentiable ones, in the order of the gradients."""
    return [
        x.new_empty(x.shape) if wanted and x is not None else no_gradient(call, x)
        for x, wanted in zip(inputs, grad_mask, strict=True)
    ]


def no_gradient(call, x: Tensor | None) -> Tensor:
    return (call.q if x is None else x).new_empty((0,))


# Calls without a token or without a sequence.


def passed_state(call) -> Tensor:
    """The state that enters leaves unchanged."""
    state = new_state(call)
    if not call.output_final_state:
        return state
    if call.initial_state is None:
        return state.zero_()
    return state.copy_(call.initial_state)


def passed_gradients(
    call,
    inputs: tuple[Tensor | None, ...],
    d_final_state: Tensor | None,
    state_index: int,
    grad_mask,
) -> tuple[Tensor, ...]:
    """`state_index` is the place of initial_state among `inputs`."""
    gradients = [x.zero_() for x in new_gradients(call, inputs, grad_mask)]
    if d_final_state is not None and call.initial_state is not None and grad_mask[state_index]:
        gradients[state_index].copy_(d_final_state)
    return tuple(gradients)


# What the kernels return, brought into the form of the schemas.


def final_state_of(call, final_state: Tensor | None) -> Tensor:
    if call.output_final_state:
        return final_state
    return new_state(call)


def gradients_of(call, inputs, gradients, grad_mask) -> tuple[Tensor, ...]:
    return tuple(
        no_gradient(call, x) if gradient is None or not wanted else gradient
        for gradient, x, wanted in zip(gradients, inputs, grad_mask, strict=True)
    )


def implement(name: str, kernel, remembered: bool = False) -> None:
    """One kernel for both devices.

    remembered: the CUDA kernel is in csrc/ops/remembered.cpp, which calls this one.
    """
    torch.library.impl(f"flaop::{name}", "CPU", kernel)
    torch.library.impl(f"flaop_launch::{name}" if remembered else f"flaop::{name}", "CUDA", kernel)
