"""Arguments of the stage ops, whose `chunk_size` is semantics and whose gates are in-chunk sums."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .decay import chunk_rows


class States(NamedTuple):
    """Shapes and dtypes of what chunk_fwd_h returns."""

    h_shape: tuple[int, ...]  # [rows, HV, K, V], or [rows, HV, V, K] with state_v_first
    h_dtype: torch.dtype
    final_shape: tuple[int, ...]  # [N, HV, K, V] likewise, or [0]
    final_dtype: torch.dtype


def check_cumsum(g: Tensor, chunk_size: int, cu_seqlens: Tensor | None) -> None:
    """Check the arguments of chunk_local_cumsum."""
    if g.dim() not in (3, 4):
        raise ValueError(
            f"g must have shape [B, T, HV] or [B, T, HV, K], got shape {list(g.shape)}"
        )
    checks.dtype("g", g, checks.GATE_DTYPES)
    checks.chunk_hints(chunk_size, 0)
    if cu_seqlens is not None:
        checks.cu_seqlens_layout(cu_seqlens, g, "g")


def check_fwd_h(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    split_size: int = 0,
    states_in_fp32: bool = False,
    state_v_first: bool = False,
) -> States:
    """Check the arguments of chunk_fwd_h; shapes and dtypes of what it returns."""
    checks.rank("k", k, "B, T, H, K")
    checks.rank("v", v, "B, T, HV, V")
    B, T, _, K, HV, V = checks.heads("k", k, v)
    checks.one_dtype(k=k, v=v)
    checks.device("v", v, k, "k")
    check_gate("g", g, (B, T, HV), "B, T, HV", k, "k")
    check_gate("g_gamma", g_gamma, (HV,), "HV", k, "k")
    check_gate("gk", gk, (B, T, HV, K), "B, T, HV, K", k, "k")
    check_gate("gv", gv, (B, T, HV, V), "B, T, HV, V", k, "k")
    N = checks.sequences(k, initial_state, cu_seqlens, state_v_first, (HV, K, V), "k")
    checks.chunk_hints(chunk_size, split_size)
    rows = chunk_rows(B, T, N, cu_seqlens is not None, split_size or chunk_size)
    state = (HV, V, K) if state_v_first else (HV, K, V)
    wide = torch.float64 if k.dtype is torch.float64 else torch.float32
    narrow = k.dtype is torch.bfloat16 and not states_in_fp32
    final_shape = (N, *state) if output_final_state else (0,)
    return States((rows, *state), torch.bfloat16 if narrow else wide, final_shape, wide)


def check_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> float:
    """Check the arguments of chunk_fwd_o; the scale."""
    B, T, _, K, HV, V = checks.qkv_shapes(q, k, v)
    checks.qkv_dtype(q, k, v)
    for name, x in (("k", k), ("v", v), ("h", h)):
        checks.device(name, x, q)
    N = checks.sequences(q, None, cu_seqlens, state_v_first, (HV, K, V))
    checks.chunk_hints(chunk_size, 0)
    rows = chunk_rows(B, T, N, cu_seqlens is not None, chunk_size)
    layout, state = "R, HV, K, V", (HV, K, V)
    if state_v_first:
        layout, state = "R, HV, V, K", (HV, V, K)
    checks.shape("h", h, (rows, *state), layout)
    checks.state_dtype("h", h, q)
    check_gate("g", g, (B, T, HV), "B, T, HV", q, "q")
    check_gate("g_gamma", g_gamma, (HV,), "HV", q, "q")
    return checks.resolved_scale(scale, K)


def check_gate(
    name: str, g: Tensor | None, expected: tuple, layout: str, x: Tensor, of: str
) -> None:
    """On the device of x, which is called `of`."""
    if g is not None:
        checks.shape(name, g, expected, layout)
        checks.dtype(name, g, checks.GATE_DTYPES)
        checks.device(name, g, x, of)
