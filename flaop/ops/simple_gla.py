"""Kernels and fakes of the simple_gla ops. Schemas and autograd are in csrc/ops/simple_gla.cpp."""

import torch

from flaop.validation.decay import check_backward, check_simple_gla

from . import decay
from .common import implement


def _chunk(*args):
    return decay.chunk(decay.checked(check_simple_gla, *args))


def _chunk_fwd(*args):
    return decay.chunk_fwd(decay.checked(check_simple_gla, *args))


def _recurrent(*args):
    return decay.recurrent(decay.checked(check_simple_gla, *args))


def _fake(*args):
    return decay.outputs_fake(check_simple_gla(*args))


def _forward_args(args):
    """The arguments of the forward, from those of a backward; both paths have the same."""
    q, k, v, g, g_gamma, initial_state, cu_seqlens, scale, *rest = args[2:-1]
    return (q, k, v, g, g_gamma, scale, initial_state, False, cu_seqlens, *rest)


def _chunk_bwd(*args):
    call = decay.checked(check_simple_gla, *_forward_args(args))
    return decay.chunk_bwd(call, args[0], args[1], None, args[-1])


def _recurrent_bwd(*args):
    call = decay.checked(check_simple_gla, *_forward_args(args))
    return decay.recurrent_bwd(call, args[0], args[1], args[-1])


def _bwd_fake(*args):
    call = check_simple_gla(*_forward_args(args))
    check_backward(call, args[0], args[1])
    return decay.gradients_fake(call, args[-1])


for name, kernel, fake in (
    ("chunk_simple_gla", _chunk, _fake),
    ("chunk_simple_gla_fwd", _chunk_fwd, _fake),
    ("chunk_simple_gla_bwd", _chunk_bwd, _bwd_fake),
    ("fused_recurrent_simple_gla", _recurrent, _fake),
    ("fused_recurrent_simple_gla_fwd", _recurrent, _fake),
    ("fused_recurrent_simple_gla_bwd", _recurrent_bwd, _bwd_fake),
):
    torch.library.register_fake(f"flaop::{name}", fake)
    implement(name, kernel, remembered=name == "chunk_simple_gla")
