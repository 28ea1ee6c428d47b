"""Kernels and fakes of the stage ops of the delta families.

Schemas and autograd are in csrc/ops/delta_stages.cpp.
"""

import torch
from torch import Tensor

from flaop.validation.delta_stages import (
    check_delta_fwd_h,
    check_recompute_w_u,
    check_solve_tril,
    check_solve_tril_backward,
)

from .common import device_guard, implement
from .stages import check_offsets, is_empty


def _solve_tril_fake(L: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    check_solve_tril(L, cu_seqlens)
    return L.new_empty(L.shape)


def _solve_tril(L: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    check_solve_tril(L, cu_seqlens)
    check_offsets(L, cu_seqlens)
    if L.numel() == 0 or is_empty(L, cu_seqlens):
        return L.new_zeros(L.shape)
    if L.device.type == "cpu":
        from flaop.reference import delta_stages

        return delta_stages.solve_tril(L, cu_seqlens)
    from flaop.launch.delta import public

    with device_guard(L):
        return public.solve_tril(L, cu_seqlens)


def _solve_tril_bwd_fake(d_X: Tensor, X: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    check_solve_tril_backward(d_X, X, cu_seqlens)
    return X.new_empty(X.shape)


def _solve_tril_bwd(d_X: Tensor, X: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    check_solve_tril_backward(d_X, X, cu_seqlens)
    check_offsets(X, cu_seqlens)
    if X.numel() == 0 or is_empty(X, cu_seqlens):
        return X.new_zeros(X.shape)
    if X.device.type == "cpu":
        from flaop.reference import delta_stages

        return delta_stages.solve_tril_backward(d_X, X, cu_seqlens)
    from flaop.launch.delta import public

    with device_guard(X):
        return public.solve_tril_backward(d_X, X, cu_seqlens)


def _recompute_w_u_fake(k: Tensor, v: Tensor, beta: Tensor, *rest) -> tuple[Tensor, Tensor]:
    check_recompute_w_u(k, v, beta, *rest)
    return k.new_empty((*v.shape[:3], k.shape[3])), v.new_empty(v.shape)


def _recompute_w_u(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    args = (k, v, beta, A, g, gk, cu_seqlens)
    check_recompute_w_u(*args)
    check_offsets(k, cu_seqlens)
    if is_empty(k, cu_seqlens):
        return tuple(x.zero_() for x in _recompute_w_u_fake(*args))
    if k.device.type == "cpu":
        from flaop.reference import delta_stages

        return delta_stages.recompute_w_u(*args)
    from flaop.launch.delta import public

    with device_guard(k):
        return public.recompute_w_u(*args)


def _delta_fwd_h_fake(*args) -> tuple[Tensor, Tensor, Tensor]:
    sizes = check_delta_fwd_h(*args)
    k, u = args[0], args[2]
    h = k.new_empty(sizes.h_shape, dtype=sizes.h_dtype)
    return h, u.new_empty(u.shape), k.new_empty(sizes.final_shape, dtype=sizes.final_dtype)


def _delta_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    args = (k, w, u, g, gk, initial_state, output_final_state, cu_seqlens, chunk_size)
    sizes = check_delta_fwd_h(*args, state_v_first)
    check_offsets(k, cu_seqlens)
    if is_empty(k, cu_seqlens):
        h, v_new, leaving = (x.zero_() for x in _delta_fwd_h_fake(*args, state_v_first))
        if output_final_state and initial_state is not None:
            leaving.copy_(initial_state)
        return h, v_new, leaving
    if k.device.type == "cpu":
        from flaop.reference import delta_stages

        h, v_new, leaving = delta_stages.delta_fwd_h(*args, state_v_first)
    else:
        from flaop.launch.delta import public

        with device_guard(k):
            h, v_new, leaving = public.chunk_delta_fwd_h(*args, state_v_first)
    if not output_final_state:
        leaving = k.new_empty((0,), dtype=sizes.final_dtype)
    return h, v_new, leaving


for name, kernel, fake in (
    ("solve_tril", _solve_tril, _solve_tril_fake),
    ("solve_tril_bwd", _solve_tril_bwd, _solve_tril_bwd_fake),
    ("recompute_w_u", _recompute_w_u, _recompute_w_u_fake),
    ("chunk_delta_fwd_h", _delta_fwd_h, _delta_fwd_h_fake),
):
    torch.library.register_fake(f"flaop::{name}", fake)
    implement(name, kernel)
