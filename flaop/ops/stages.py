"""Kernels and fakes of the stage ops. Schemas and autograd are in csrc/ops/stages.cpp."""

import torch
from torch import Tensor

from flaop.validation import checks
from flaop.validation.stages import check_cumsum, check_fwd_h, check_fwd_o

from .common import device_guard, implement


def check_offsets(x: Tensor, cu_seqlens: Tensor | None) -> None:
    if checks.DEBUG and cu_seqlens is not None:
        checks.cu_seqlens_values(cu_seqlens, x.shape[1])


def is_empty(x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """No token or no sequence: nothing to launch."""
    return x.shape[0] * x.shape[1] == 0 or (cu_seqlens is not None and len(cu_seqlens) == 1)


def _local_cumsum_fake(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    check_cumsum(g, chunk_size, cu_seqlens)
    return g.new_empty(g.shape, dtype=torch.float32)


def _local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    check_cumsum(g, chunk_size, cu_seqlens)
    check_offsets(g, cu_seqlens)
    if g.numel() == 0 or is_empty(g, cu_seqlens):
        return g.new_zeros(g.shape, dtype=torch.float32)
    if g.device.type == "cpu":
        from flaop.reference import stages

        return stages.local_cumsum(g, chunk_size, reverse, scale, cu_seqlens)
    from flaop.launch.decay import stages

    with device_guard(g):
        return stages.local_cumsum(g, chunk_size, reverse, scale, cu_seqlens)


def _fwd_h_fake(*args) -> tuple[Tensor, Tensor]:
    sizes = check_fwd_h(*args)
    k = args[0]
    h = k.new_empty(sizes.h_shape, dtype=sizes.h_dtype)
    return h, k.new_empty(sizes.final_shape, dtype=sizes.final_dtype)


def _fwd_h(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *hints,
) -> tuple[Tensor, Tensor]:
    args = (k, v, g, g_gamma, gk, gv, initial_state, output_final_state, cu_seqlens, *hints)
    sizes = check_fwd_h(*args)
    check_offsets(k, cu_seqlens)
    if is_empty(k, cu_seqlens):
        final_state = k.new_zeros(sizes.final_shape, dtype=sizes.final_dtype)
        if output_final_state and initial_state is not None:
            final_state.copy_(initial_state)
        return k.new_zeros(sizes.h_shape, dtype=sizes.h_dtype), final_state
    if k.device.type == "cpu":
        from flaop.reference import stages

        h, leaving = stages.fwd_h(*args)
    else:
        from flaop.launch.decay import stages

        with device_guard(k):
            h, leaving = stages.fwd_h(*args)
    return h, leaving if output_final_state else k.new_empty((0,), dtype=sizes.final_dtype)


def _fwd_o_fake(q: Tensor, k: Tensor, v: Tensor, *rest) -> Tensor:
    check_fwd_o(q, k, v, *rest)
    return v.new_empty(v.shape)


def _fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    *hints,
) -> Tensor:
    scale = check_fwd_o(q, k, v, h, g, g_gamma, scale, cu_seqlens, *hints)
    check_offsets(q, cu_seqlens)
    if is_empty(q, cu_seqlens):
        return v.new_zeros(v.shape)
    if q.device.type == "cpu":
        from flaop.reference import stages

        return stages.fwd_o(q, k, v, h, g, g_gamma, scale, cu_seqlens, *hints)
    from flaop.launch.decay import stages

    with device_guard(q):
        return stages.fwd_o(q, k, v, h, g, g_gamma, scale, cu_seqlens, *hints)


for name, kernel, fake in (
    ("chunk_local_cumsum", _local_cumsum, _local_cumsum_fake),
    ("chunk_fwd_h", _fwd_h, _fwd_h_fake),
    ("chunk_fwd_o", _fwd_o, _fwd_o_fake),
):
    torch.library.register_fake(f"flaop::{name}", fake)
    implement(name, kernel)
