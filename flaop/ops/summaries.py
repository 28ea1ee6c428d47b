"""Kernels and fakes of the summary ops, for every family with kernels of its own.

What the last sequence of a shard does to the state that enters it, and in reverse the first
sequence to the gradient of the state that leaves it: with a batch, every sequence. Schemas and
autograd are in csrc/ops/summaries.cpp.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flaop.validation import checks, decay, gated_delta_rule, kda, summaries

from .common import device_guard, implement, is_empty, new_output


class Family(NamedTuple):
    """What differs. A `call` is the checked call of the family."""

    check: Callable  # arguments of the forward op -> call
    check_bwd: Callable  # of the backward op, whose d_o is the v of the call
    check_values: Callable  # of a call, under FLAOP_DEBUG=1
    reference: Callable  # -> the module of the CPU kernels
    launcher: Callable  # -> the module that launches the CUDA kernels
    check_fwd: Callable | None = None  # of the op that gives outputs, too


def _delta_reference():
    from flaop.reference import kda

    return kda


def _decay_reference():
    from flaop.reference import decay

    return decay


def _kda_launcher():
    from flaop.launch.delta import chunk

    return chunk


def _gated_delta_rule_launcher():
    from flaop.launch.delta import gdn

    return gdn


def _decay_launcher():
    from flaop.launch.decay import chunk

    return chunk


_FAMILIES = {
    "kda": Family(
        summaries.check_kda, summaries.check_kda_bwd, kda.check_values,
        _delta_reference, _kda_launcher, summaries.check_kda_fwd,
    ),
    "gated_delta_rule": Family(
        summaries.check_gated_delta_rule, summaries.check_gated_delta_rule_bwd,
        gated_delta_rule.check_values, _delta_reference, _gated_delta_rule_launcher,
        summaries.check_gated_delta_rule_fwd,
    ),
    "simple_gla": Family(
        summaries.check_simple_gla_summary, summaries.check_simple_gla_summary_bwd,
        decay.check_values, _decay_reference, _decay_launcher,
    ),
    "gla": Family(
        summaries.check_gla_summary, summaries.check_gla_summary_bwd,
        decay.check_values, _decay_reference, _decay_launcher,
    ),
}  # fmt: skip


def _one_sequence(call, last: bool):
    """The call on the last packed sequence that has tokens, or on the first; `call` if batched."""
    if call.cu_seqlens is None:
        return call
    bounds = call.cu_seqlens.long().clamp(0, call.T).cummax(0).values
    start, end = bounds[:1], bounds[-1:]
    if last:
        start = torch.where(bounds < end, bounds, start).amax(0, keepdim=True)
    else:
        end = torch.where(bounds > start, bounds, end).amin(0, keepdim=True)
    return call._replace(cu_seqlens=torch.cat((start, end)), N=1)


def _new_summary(call) -> tuple[Tensor, Tensor]:
    """Room for the state [N, HV, K, V] and the transfer: [N, HV, K, K] of a delta family, else
    its diagonal, [N, HV, K] for gates per channel and [N, HV, 1] for gates per head."""
    N = call.B if call.cu_seqlens is None else 1
    shape = (N, call.HV, call.K)
    if not isinstance(call, decay.DecayCall):
        transfer = (*shape, call.K)
    else:
        transfer = shape if call.channel else (N, call.HV, 1)
    new = partial(call.q.new_empty, dtype=call.state_dtype)
    return new((*shape, call.V)), new(transfer)


def _identity(call) -> tuple[Tensor, Tensor]:
    """The summary of no tokens."""
    state, transfer = _new_summary(call)
    transfer.fill_(1)
    if transfer.dim() == 4:
        transfer.tril_().triu_()
    return state.zero_(), transfer


def _run(
    family: Family, check: Callable, name: str, last: bool, residuals: int, *args
) -> tuple[Tensor, Tensor]:
    """`residuals`: so many are among the arguments, behind d_o, q, k, g and beta."""
    call = check(*args)
    if checks.DEBUG:
        family.check_values(call)
    if is_empty(call):
        return _identity(call)
    call = _one_sequence(call, last)
    more = (*args[5 : 5 + residuals], *(None,) * residuals)[:residuals]
    if call.cu_seqlens is not None:
        more = more[:2]  # the others are by chunk, and those of all sequences
    if call.q.device.type == "cpu":
        return getattr(family.reference(), f"chunk_{name}")(call, *more)
    with device_guard(call.q):
        return getattr(family.launcher(), name)(call, *more)


def _fake(check: Callable, *args) -> tuple[Tensor, Tensor]:
    return _new_summary(check(*args))


def _new_forward(call) -> list[Tensor]:
    """Room for what chunk_F_summary_fwd returns."""
    read = call.q.new_empty((call.B, call.T, call.HV, call.K))
    A, A_qk = (call.q.new_empty((call.B, call.T, call.HV, checks.CHUNK)) for _ in range(2))
    return [new_output(call), read, *_new_summary(call), A, A_qk]


def _forward(family: Family, *args) -> list[Tensor]:
    call = family.check_fwd(*args)
    if checks.DEBUG:
        family.check_values(call)
    if is_empty(call):
        o, read, _, _, A, A_qk = _new_forward(call)
        return [o, read, *_identity(call), A, A_qk]
    if call.q.device.type == "cpu":
        return list(family.reference().chunk_summary_forward(call))
    with device_guard(call.q):
        return list(family.launcher().summary_forward(call))


def _forward_fake(family: Family, *args) -> list[Tensor]:
    return _new_forward(family.check_fwd(*args))


for name, family in _FAMILIES.items():
    residuals = {"kda": 6, "gated_delta_rule": 2}.get(name, 0)
    for op, check, kernel, options in (
        (f"chunk_{name}_summary", family.check, "summary", (True, 0)),
        (f"chunk_{name}_summary_bwd", family.check_bwd, "summary_backward", (False, residuals)),
    ):
        torch.library.register_fake(f"flaop::{op}", partial(_fake, check))
        implement(op, partial(_run, family, check, kernel, *options))
    if family.check_fwd is not None:
        op = f"chunk_{name}_summary_fwd"
        torch.library.register_fake(f"flaop::{op}", partial(_forward_fake, family))
        implement(op, partial(_forward, family))
