"""Kernels and fakes of the KDA ops. Schemas, autograd and autocast are in csrc/ops/kda.cpp."""

import torch
from torch import Tensor

from flaop.validation.checks import CHUNK
from flaop.validation.kda import KdaCall, check, check_backward, check_values

from . import delta
from .common import device_guard, implement, is_empty


def _reference():
    from flaop.reference import kda

    return kda


def _launchers():
    from flaop.launch.delta import chunk, recurrent

    return chunk, recurrent


def _new_kept(call: KdaCall, keep: bool) -> list[Tensor]:
    """w, qg, kg, decay, v_new, h."""
    shape = (call.rows, call.HV, CHUNK, call.K)
    keys = [delta.new_residual(call, keep, shape, call.q.dtype) for _ in range(3)]
    decay = delta.new_residual(call, keep, (call.rows, call.HV, call.K), torch.float32)
    return [*keys, decay, *delta.new_states(call, keep)]


_FAMILY = delta.Family(
    name="kda",
    check=check,
    check_values=check_values,
    reference=_reference,
    launchers=_launchers,
    new_kept=_new_kept,
    residuals=8,
)


def _checked_recompute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *options,
) -> KdaCall:
    """The batched call that chunk_kda_recompute is about. `options` end with chunk_size."""
    call = check(q, k, v, g, beta, scale, initial_state, False, None, A_log, dt_bias, *options)
    check_backward(call, None, None, A=A)
    return call


def _recompute(*args) -> list[Tensor]:
    """The CPU kernels take nothing but A and A_qk: there the residuals stay empty."""
    call = _checked_recompute(*args)
    if call.q.device.type == "cpu" or is_empty(call):
        return _new_kept(call, False)
    chunk, _ = _launchers()
    with device_guard(call.q):
        return list(chunk.recompute(call, args[5]))


def _recompute_fake(*args) -> list[Tensor]:
    call = _checked_recompute(*args)
    return _new_kept(call, call.q.device.type == "cuda" and not is_empty(call))


def _flash_fake(*args):
    pieces_position = 18
    return delta.outputs_fake(_FAMILY, *args[:pieces_position])


for name, kernel, fake in delta.ops(_FAMILY):
    torch.library.register_fake(f"flaop::{name}", fake)
    implement(name, kernel, remembered=name == "chunk_kda")
torch.library.register_fake("flaop::chunk_kda_recompute", _recompute_fake)
implement("chunk_kda_recompute", _recompute)
# Its CPU and CUDA kernels are in C++.
torch.library.register_fake("flaop::flash_kda_fwd", _flash_fake)
