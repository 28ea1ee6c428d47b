"""Arguments of the stage ops of the delta families. Chunks have the width of A, or `chunk_size`."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .decay import chunk_rows
from .stages import check_gate


class DeltaStates(NamedTuple):
    """Shapes and dtypes of what chunk_delta_fwd_h returns beside v_new."""

    h_shape: tuple[int, ...]  # [rows, HV, K, V], or [rows, HV, V, K] with state_v_first
    h_dtype: torch.dtype
    final_shape: tuple[int, ...]  # [N, HV, K, V] likewise, or [0]
    final_dtype: torch.dtype


def check_solve_tril(L: Tensor, cu_seqlens: Tensor | None, name: str = "L") -> None:
    """Check the arguments of solve_tril; `name` is what L is called."""
    checks.rank(name, L, "B, T, H, BT")
    checks.one_dtype(**{name: L})
    _chunk_width(name, L)
    if cu_seqlens is not None:
        checks.cu_seqlens_layout(cu_seqlens, L, name)


def check_solve_tril_backward(d_X: Tensor, X: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check the arguments of solve_tril_bwd."""
    check_solve_tril(X, cu_seqlens, "X")
    checks.shape("d_X", d_X, tuple(X.shape), "B, T, H, BT")
    checks.one_dtype(X=X, d_X=d_X)
    checks.device("d_X", d_X, X, "X")


def check_recompute_w_u(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Check the arguments of recompute_w_u."""
    B, T, HV, K, _ = _keys_and_values(k, "v", v)
    checks.one_dtype(k=k, v=v)
    check_gate("beta", beta, (B, T, HV), "B, T, HV", k, "k")
    checks.rank("A", A, "B, T, HV, BT")
    checks.shape("A", A, (B, T, HV, _chunk_width("A", A)), "B, T, HV, BT")
    checks.state_dtype("A", A, k)
    checks.device("A", A, k, "k")
    check_gate("g", g, (B, T, HV), "B, T, HV", k, "k")
    check_gate("gk", gk, (B, T, HV, K), "B, T, HV, K", k, "k")
    if cu_seqlens is not None:
        checks.cu_seqlens_layout(cu_seqlens, k, "k")


def check_delta_fwd_h(
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
) -> DeltaStates:
    """Check the arguments of chunk_delta_fwd_h; shapes and dtypes of what it returns."""
    B, T, HV, K, V = _keys_and_values(k, "u", u)
    checks.shape("w", w, (B, T, HV, K), "B, T, HV, K")
    checks.one_dtype(k=k, w=w, u=u)
    checks.device("w", w, k, "k")
    check_gate("g", g, (B, T, HV), "B, T, HV", k, "k")
    check_gate("gk", gk, (B, T, HV, K), "B, T, HV, K", k, "k")
    N = checks.sequences(k, initial_state, cu_seqlens, state_v_first, (HV, K, V), "k")
    checks.chunk_hints(chunk_size, 0)
    rows = chunk_rows(B, T, N, cu_seqlens is not None, chunk_size)
    state = (HV, V, K) if state_v_first else (HV, K, V)
    wide = torch.float64 if k.dtype is torch.float64 else torch.float32
    narrow = k.dtype is torch.bfloat16
    final_shape = (N, *state) if output_final_state else (0,)
    return DeltaStates((rows, *state), torch.bfloat16 if narrow else wide, final_shape, wide)


def _keys_and_values(k: Tensor, name: str, v: Tensor) -> tuple[int, int, int, int, int]:
    """B, T, HV, K, V; the values are called `name`."""
    checks.rank("k", k, "B, T, H, K")
    checks.rank(name, v, "B, T, HV, V")
    B, T, _, K, HV, V = checks.heads("k", k, v, name)
    checks.delta_channels("k", K)
    checks.device(name, v, k, "k")
    return B, T, HV, K, V


def _chunk_width(name: str, x: Tensor) -> int:
    """BT, the size of the last dimension."""
    if x.shape[-1] not in checks.CHUNK_SIZES:
        raise ValueError(
            f"{name} must have chunks of BT in {checks.CHUNK_SIZES} tokens as its last dimension, "
            f"got shape {list(x.shape)}; use torch.linalg.solve_triangular for other sizes"
        )
    return x.shape[-1]
