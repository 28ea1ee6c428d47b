"""Launchers of the public stages of the delta families. Their chunk size is semantics, their gates
are in-chunk sums of natural-log gates.

Tensors are as the stage ops check them (flaop.validation.delta_stages).
"""

import torch

from flaop.triton_kernels.configs import gdn as configs

from ..kernel import Kernel, arch, prepare
from ..table import chunk_table, zero_outside, zero_unused
from .problem import DTYPE_NAMES

_solve = Kernel("delta.triangle", "solve_tril_kernel")
_solve_backward = Kernel("delta.triangle", "solve_tril_bwd_kernel")
_w_u = Kernel("delta.states", "recompute_w_u_kernel")
_states = Kernel("delta.states", "chunk_delta_fwd_kernel_h")


def _table(cu_seqlens, B, T, chunk_size):
    """(sequences, rows, bounds, offsets, table rows, table or None) of chunks of that size."""
    if cu_seqlens is None:
        return B, B * -(-T // chunk_size), None, None, None, None
    N = cu_seqlens.numel() - 1
    rows = max(-(-T // chunk_size) + N - 1, 0)
    table = chunk_table(cu_seqlens, T, rows, chunk_size)
    return N, rows, *table, table


def _tiles(x, K, V, chunk_size, function):
    """(constexpr tiles, launch options) of a configuration function."""
    config = function(arch(x.device), K, V, DTYPE_NAMES[x.dtype])
    tiles = {"K": K, "V": V, "BT": chunk_size, "BK": config.pop("BK"), "BV": config.pop("BV")}
    return tiles, config


def _precision(x):
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def solve_tril(L, cu_seqlens=None):
    """(I + L)^-1 of each chunk, like L [B, T, H, BT]. Grid: (row, head)."""
    L = prepare(L)
    B, T, H, BT = L.shape
    X = torch.empty_like(L)
    _, rows, bounds, _, table_rows, table = _table(cu_seqlens, B, T, BT)
    zero_outside(X, table)
    compute = torch.float64 if L.dtype == torch.float32 else torch.float32
    _solve(
        (rows * H,),
        (L, X, bounds, table_rows, T, B, H),
        {"BT": BT, "IS_VARLEN": table is not None, "COMPUTE": compute},
        num_warps=4,
    )
    return X


def solve_tril_backward(dX, X, cu_seqlens=None):
    """Gradient of L from that of the inverse X, like X. Grid: (row, head)."""
    X, dX = prepare(X), prepare(dX)
    B, T, H, BT = X.shape
    dL = torch.empty_like(X)
    _, rows, bounds, _, table_rows, table = _table(cu_seqlens, B, T, BT)
    zero_outside(dL, table)
    _solve_backward(
        (rows * H,),
        (X, dX, dL, bounds, table_rows, T, B, H),
        {"BT": BT, "IS_VARLEN": table is not None},
        num_warps=4,
    )
    return dL


def recompute_w_u(k, v, beta, A, g=None, gk=None, cu_seqlens=None):
    """(w [B, T, HV, K], u [B, T, HV, V]) in k's dtype. Grid: (row, value head, slab of K or V)."""
    k, v, beta, A, g, gk = map(prepare, (k, v, beta, A, g, gk))
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    w, u = k.new_empty(B, T, HV, K), torch.empty_like(v)
    BT = A.shape[3]
    _, rows, bounds, _, table_rows, table = _table(cu_seqlens, B, T, BT)
    for x in (w, u):
        zero_outside(x, table)
    tiles, options = _tiles(k, K, V, BT, configs.w_u)
    slabs = -(-K // tiles["BK"]) + -(-V // tiles["BV"])
    _w_u(
        (rows * HV * slabs,),
        (k, v, beta, A, g, gk, w, u, bounds, table_rows, T, B, H, HV),
        tiles | {
            "USE_G": g is not None, "USE_GK": gk is not None,
            "IS_VARLEN": table is not None, "PRECISION": _precision(k),
        },
        **options,
    )  # fmt: skip
    return w, u


def chunk_delta_fwd_h(
    k,
    w,
    u,
    g=None,
    gk=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    chunk_size=64,
    state_v_first=False,
):
    """(h: the states that enter the chunks, v_new like u, final state or an empty tensor).

    Grid: V tile, head, sequence.
    """
    k, w, u, g, gk, h0 = map(prepare, (k, w, u, g, gk, initial_state))
    B, T, H, K = k.shape
    HV, V = u.shape[2:]
    N, rows, bounds, offsets, _, table = _table(cu_seqlens, B, T, chunk_size)
    narrow = k.dtype == torch.bfloat16
    state = (HV, V, K) if state_v_first else (HV, K, V)
    h = k.new_empty(rows, *state, dtype=torch.bfloat16 if narrow else torch.float32)
    if rows:
        zero_unused(h, table)
    v_new = torch.empty_like(u)
    zero_outside(v_new, table)
    ht = k.new_empty(N, *state, dtype=torch.float32)
    tiles, options = _tiles(k, K, V, chunk_size, configs.states)
    _states(
        (-(-V // tiles["BV"]) * N * HV,),
        (k, w, u, g, gk, h, v_new, h0, ht, bounds, offsets, T, B, H, HV, rows),
        tiles | {
            "USE_G": g is not None, "USE_GK": gk is not None, "HAS_H0": h0 is not None,
            "V_FIRST": state_v_first, "IS_VARLEN": table is not None, "PRECISION": _precision(k),
            "STATE_DTYPE": torch.bfloat16 if narrow else torch.float32,
        },
        **options,
    )  # fmt: skip
    return h, v_new, ht if output_final_state else ht.new_empty(0)
