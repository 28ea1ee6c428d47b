"""Kernels and fakes of the gla ops. Schemas and autograd are in csrc/ops/gla.cpp."""

import torch

from flaop.validation.decay import check_backward, check_gla

from . import decay
from .common import implement


def _chunk(*args):
    return decay.chunk(decay.checked(check_gla, *args))


def _chunk_fwd(*args):
    return decay.chunk_fwd(decay.checked(check_gla, *args))


def _recurrent(*args):
    return decay.recurrent(decay.checked(check_gla, *args))


def _fake(*args):
    return decay.outputs_fake(check_gla(*args))


def _chunk_fwd_fake(*args):
    return decay.residuals_fake(check_gla(*args))


def _forward_args(args):
    """The arguments of the forward from those of a backward, and the residual or gv."""
    q, k, v, g, initial_state, cu_seqlens, A_or_gv, scale, *rest = args[2:-1]
    return (q, k, v, g, scale, initial_state, False, cu_seqlens, *rest), A_or_gv


def _chunk_bwd(*args):
    forward, A = _forward_args(args)
    return decay.chunk_bwd(decay.checked(check_gla, *forward), args[0], args[1], A, args[-1])


def _chunk_bwd_fake(*args):
    forward, A = _forward_args(args)
    call = check_gla(*forward)
    check_backward(call, args[0], args[1], A)
    return decay.gradients_fake(call, args[-1])


def _recurrent_call_args(args):
    # It takes no hints.
    forward, gv = _forward_args(args)
    return (*forward, 64, 0, gv)


def _recurrent_bwd(*args):
    call = decay.checked(check_gla, *_recurrent_call_args(args))
    return decay.recurrent_bwd(call, args[0], args[1], args[-1])


def _recurrent_bwd_fake(*args):
    call = check_gla(*_recurrent_call_args(args))
    check_backward(call, args[0], args[1])
    return decay.gradients_fake(call, args[-1])


for name, kernel, fake in (
    ("chunk_gla", _chunk, _fake),
    ("chunk_gla_fwd", _chunk_fwd, _chunk_fwd_fake),
    ("chunk_gla_bwd", _chunk_bwd, _chunk_bwd_fake),
    ("fused_recurrent_gla", _recurrent, _fake),
    ("fused_recurrent_gla_fwd", _recurrent, _fake),
    ("fused_recurrent_gla_bwd", _recurrent_bwd, _recurrent_bwd_fake),
):
    torch.library.register_fake(f"flaop::{name}", fake)
    implement(name, kernel, remembered=name == "chunk_gla")
