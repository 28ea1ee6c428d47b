"""Kernels and fakes of the delta families, kda and gated_delta_rule.

Their ops differ in flags and residuals only: a backward op takes two incoming gradients, nine
inputs, residuals, the scale, flags and grad_mask.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flaop.validation import checks
from flaop.validation.checks import CHUNK
from flaop.validation.kda import check_backward

from . import common


class Family(NamedTuple):
    """What differs. A `call` is the checked call of the family."""

    name: str  # of the dispatcher
    check: Callable  # arguments of a forward op -> call
    check_values: Callable  # of a call, under FLAOP_DEBUG=1
    reference: Callable  # -> the module of the CPU kernels
    launchers: Callable  # -> the modules that launch the chunk and the recurrent kernels
    new_kept: Callable  # (call, keep) -> residuals behind A and A_qk, empty unless kept
    residuals: int  # of the chunk path


def new_states(call, keep: bool) -> list[Tensor]:
    """The residuals v_new and h."""
    # fp16 states leave its range in ungated sums.
    narrow = keep and call.q.dtype is torch.bfloat16
    return [
        new_residual(call, keep, (call.B, call.T, call.HV, call.V), call.q.dtype),
        new_residual(
            *(call, keep, (call.rows, call.HV, call.K, call.V)),
            torch.bfloat16 if narrow else torch.float32,
        ),
    ]


def new_residual(call, keep: bool, shape: tuple, dtype: torch.dtype) -> Tensor:
    """An empty tensor where the backward computes it again."""
    return call.q.new_empty(shape if keep else (0,), dtype=dtype)


def _new_chunk_residuals(family: Family, call) -> list[Tensor]:
    A = [call.q.new_empty((call.B, call.T, call.HV, CHUNK)) for _ in range(2)]
    keep = call.disable_recompute and call.q.device.type == "cuda"
    return A + family.new_kept(call, keep)


def _new_u(call) -> Tensor:
    return call.v.new_empty((call.B, call.T, call.HV, call.V), dtype=call.state_dtype)


def _inputs(call) -> tuple[Tensor | None, ...]:
    """The differentiable inputs, in the order of the gradients."""
    return (
        call.q,
        call.k,
        call.v,
        call.g,
        call.beta,
        call.A_log,
        call.dt_bias,
        call.initial_state,
    )


# The place of initial_state among them.
_STATE = 7


def _checked(family: Family, *args):
    """For the kernels: a fake has no values to look at."""
    call = family.check(*args)
    if checks.DEBUG:
        family.check_values(call)
    return call


def outputs_fake(family: Family, *args):
    call = family.check(*args)
    return common.new_output(call), common.new_state(call)


# The chunk path and its forward with residuals


def _chunk(family: Family, *args):
    call = _checked(family, *args)
    if common.is_empty(call):
        return common.new_output(call).zero_(), common.passed_state(call)
    if call.q.device.type == "cpu":
        o, final_state, *_ = family.reference().chunk_forward(call, residuals=False)
    else:
        chunk, _ = family.launchers()
        with common.device_guard(call.q):
            o, final_state = chunk.forward(call, remember=not checks.DEBUG)
    return o, common.final_state_of(call, final_state)


def _chunk_fwd(family: Family, *args):
    call = _checked(family, *args)
    if common.is_empty(call):
        residuals = [x.zero_() for x in _new_chunk_residuals(family, call)]
        return common.new_output(call).zero_(), common.passed_state(call), *residuals
    if call.q.device.type == "cpu":
        o, final_state, A, A_qk = family.reference().chunk_forward(call)
        kept = family.new_kept(call, False)
    else:
        chunk, _ = family.launchers()
        with common.device_guard(call.q):
            o, final_state, A, A_qk, *kept = chunk.forward_residuals(call)
        if not call.disable_recompute:
            kept = family.new_kept(call, False)
    return o, common.final_state_of(call, final_state), A, A_qk, *kept


def _chunk_fwd_fake(family: Family, *args):
    call = family.check(*args)
    residuals = _new_chunk_residuals(family, call)
    return common.new_output(call), common.new_state(call), *residuals


def _split_backward(args: tuple, count: int) -> tuple[tuple, tuple]:
    """The arguments of the forward, from those of a backward with `count` residuals; and these."""
    q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias = args[2:11]
    scale, *flags = args[11 + count : -1]
    # output_final_state is not among the arguments.
    forward = (q, k, v, g, beta, scale, initial_state, False, cu_seqlens, A_log, dt_bias, *flags)
    return forward, args[11 : 11 + count]


def _chunk_bwd(family: Family, *args):
    forward, residuals = _split_backward(args, family.residuals)
    call = _checked(family, *forward)
    d_o, d_final_state, grad_mask = args[0], args[1], args[-1]
    A, A_qk, *_ = residuals
    check_backward(call, d_o, d_final_state, A=A, A_qk=A_qk)
    if common.is_empty(call):
        return common.passed_gradients(call, _inputs(call), d_final_state, _STATE, grad_mask)
    if call.q.device.type == "cpu":
        gradients = family.reference().chunk_backward(call, d_o, d_final_state, A, A_qk, grad_mask)
    else:
        chunk, _ = family.launchers()
        with common.device_guard(call.q):
            gradients = chunk.backward(call, d_o, d_final_state, residuals, grad_mask)
    return common.gradients_of(call, _inputs(call), gradients, grad_mask)


def _chunk_bwd_fake(family: Family, *args):
    forward, (A, A_qk, *_) = _split_backward(args, family.residuals)
    call = family.check(*forward)
    check_backward(call, args[0], args[1], A=A, A_qk=A_qk)
    return tuple(common.new_gradients(call, _inputs(call), args[-1]))


# The recurrent path and its forward with residuals


def _recurrent(family: Family, *args):
    call = _checked(family, *args)
    if common.is_empty(call):
        return common.new_output(call).zero_(), common.passed_state(call)
    if call.q.device.type == "cpu":
        o, final_state, _ = family.reference().recurrent_forward(call)
    else:
        _, recurrent = family.launchers()
        with common.device_guard(call.q):
            o, final_state = recurrent.forward(call)
    return o, common.final_state_of(call, final_state)


def _recurrent_fwd(family: Family, *args):
    call = _checked(family, *args)
    if common.is_empty(call):
        return common.new_output(call).zero_(), common.passed_state(call), _new_u(call).zero_()
    if call.q.device.type == "cpu":
        o, final_state, u = family.reference().recurrent_forward(call)
    else:
        _, recurrent = family.launchers()
        with common.device_guard(call.q):
            o, final_state, u = recurrent.forward_residuals(call)
    return o, common.final_state_of(call, final_state), u


def _recurrent_fwd_fake(family: Family, *args):
    call = family.check(*args)
    return common.new_output(call), common.new_state(call), _new_u(call)


def _recurrent_bwd(family: Family, *args):
    forward, (u,) = _split_backward(args, 1)
    call = _checked(family, *forward)
    d_o, d_final_state, grad_mask = args[0], args[1], args[-1]
    check_backward(call, d_o, d_final_state, u=u)
    if common.is_empty(call):
        return common.passed_gradients(call, _inputs(call), d_final_state, _STATE, grad_mask)
    if call.q.device.type == "cpu":
        gradients = family.reference().recurrent_backward(call, d_o, d_final_state, u, grad_mask)
    else:
        _, recurrent = family.launchers()
        with common.device_guard(call.q):
            gradients = recurrent.backward(call, d_o, d_final_state, u, grad_mask)
    return common.gradients_of(call, _inputs(call), gradients, grad_mask)


def _recurrent_bwd_fake(family: Family, *args):
    forward, (u,) = _split_backward(args, 1)
    call = family.check(*forward)
    check_backward(call, args[0], args[1], u=u)
    return tuple(common.new_gradients(call, _inputs(call), args[-1]))


def ops(family: Family) -> list[tuple[str, Callable, Callable]]:
    """Name, kernel and fake of each; the module that the schemas name must register the fakes."""
    return [
        (path.format(family.name), partial(kernel, family), partial(fake, family))
        for path, kernel, fake in (
            ("chunk_{}", _chunk, outputs_fake),
            ("chunk_{}_fwd", _chunk_fwd, _chunk_fwd_fake),
            ("chunk_{}_bwd", _chunk_bwd, _chunk_bwd_fake),
            ("fused_recurrent_{}", _recurrent, outputs_fake),
            ("fused_recurrent_{}_fwd", _recurrent_fwd, _recurrent_fwd_fake),
            ("fused_recurrent_{}_bwd", _recurrent_bwd, _recurrent_bwd_fake),
        )
    ]
