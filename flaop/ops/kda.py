"""Kernels and fakes of the KDA ops. Schemas, autograd and autocast are in csrc/ops/kda.cpp."""

import torch
from torch import Tensor

from flaop.validation.checks import CHUNK
from flaop.validation.kda import KdaCall, check, check_values

from . import delta
from .common import implement


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


def _flash_fake(*args):
    pieces_position = 18
    return delta.outputs_fake(_FAMILY, *args[:pieces_position])


for name, kernel, fake in delta.ops(_FAMILY):
    torch.library.register_fake(f"flaop::{name}", fake)
    implement(name, kernel, remembered=name == "chunk_kda")
# Its CPU and CUDA kernels are in C++.
torch.library.register_fake("flaop::flash_kda_fwd", _flash_fake)
