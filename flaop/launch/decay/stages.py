"""Launchers of the public stages. Their gates are in-chunk sums, their chunk size is semantics.

Tensors are as the stage ops check them (flaop.validation.stages).
"""

import torch

from flaop.triton_kernels.configs import decay as configs

from ..kernel import Kernel, arch, prepare
from ..table import chunk_table, zero_outside, zero_unused
from .problem import DTYPE_NAMES, gate_dtype, row_count

_cumsum = Kernel("decay.cumsum", "chunk_local_cumsum_kernel")
_states = Kernel("decay.states", "chunk_fwd_kernel_h")
_outputs = Kernel("decay.outputs", "chunk_fwd_kernel_o")


def _table(cu_seqlens, B, T, chunk_size):
    """(sequences, rows, chunk table or None) of chunks of that size."""
    packed = cu_seqlens is not None
    N = cu_seqlens.numel() - 1 if packed else B
    rows = row_count(B, T, N, packed, chunk_size)
    return N, rows, chunk_table(cu_seqlens, T, rows, chunk_size)


def _parts(table):
    return table or (None, None, None)


def local_cumsum(g, chunk_size, reverse=False, scale=1.0, cu_seqlens=None):
    """Sums of g [B, T, HV] or [B, T, HV, K] within chunks, fp32. Grid: columns, row."""
    g = prepare(g)
    y = torch.empty_like(g, dtype=torch.float32)
    B, T = g.shape[:2]
    D = g.shape[2:].numel()
    _, rows, table = _table(cu_seqlens, B, T, chunk_size)
    zero_outside(y, table)
    bounds, _, table_rows = _parts(table)
    _cumsum(
        (rows * -(-D // 64),),
        (g, y, bounds, table_rows, float(scale), T, B, D),
        {"BT": chunk_size, "BD": 64, "REVERSE": reverse, "IS_VARLEN": table is not None},
        num_warps=4,
    )
    return y


def _tiles(x, K, V, chunk_size, function):
    """(constexpr tiles, launch options) of a configuration function."""
    config = function(arch(x.device), K, V, DTYPE_NAMES[x.dtype])
    tiles = {"K": K, "V": V, "BT": chunk_size, "BK": config.pop("BK"), "BV": config.pop("BV")}
    return tiles, config


def _precision(x):
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def fwd_h(
    k,
    v,
    g=None,
    g_gamma=None,
    gk=None,
    gv=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    chunk_size=64,
    split_size=0,
    states_in_fp32=False,
    state_v_first=False,
):
    """(h, final state or an empty tensor): the states that enter the chunks or splits.

    Grid: tile of the state, head, sequence.
    """
    k, v, g, g_gamma, gk, gv, h0 = map(prepare, (k, v, g, g_gamma, gk, gv, initial_state))
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    N, rows, table = _table(cu_seqlens, B, T, chunk_size)
    bounds, offsets, _ = _parts(table)
    kept, splits = rows, None
    if split_size:
        _, kept, split_table = _table(cu_seqlens, B, T, split_size)
        splits = _parts(split_table)[1]
    narrow = k.dtype == torch.bfloat16 and not states_in_fp32
    state = (HV, V, K) if state_v_first else (HV, K, V)
    h = k.new_empty(kept, *state, dtype=torch.bfloat16 if narrow else torch.float32)
    if kept:
        zero_unused(h, split_table if split_size else table)
    ht = k.new_empty(N, *state, dtype=torch.float32)
    tiles, options = _tiles(k, K, V, chunk_size, configs.states)
    _states(
        (-(-K // tiles["BK"]) * -(-V // tiles["BV"]) * N * HV,),
        (
            # all chunks in one launch: nothing is carried
            k, v, g, g_gamma, gk, gv, None, h, h0, ht, ht, ht, bounds, offsets, splits,
            T, B, H, HV, 0, rows, max(split_size // chunk_size, 1),
        ),
        tiles | {
            "USE_G": g is not None, "USE_G_GAMMA": g_gamma is not None,
            "GATE_DTYPE": gate_dtype(k),
            "USE_GK": gk is not None, "USE_GV": gv is not None,
            "DECAYED": False, "CUMULATIVE": True, "STORE_H": True, "SPLIT": split_size > 0,
            "STORE_FINAL": True, "HAS_H0": h0 is not None,
            "V_FIRST": state_v_first, "H_V_FIRST": state_v_first,
            "IS_VARLEN": table is not None, "PRECISION": _precision(k),
        },
        **options,
    )  # fmt: skip
    return h, ht if output_final_state else ht.new_empty(0)


def fwd_o(
    q,
    k,
    v,
    h,
    g=None,
    g_gamma=None,
    scale=None,
    cu_seqlens=None,
    chunk_size=64,
    state_v_first=False,
):
    """The outputs from the states h that enter the chunks. Grid: V tile, head, row."""
    q, k, v, h, g, g_gamma = map(prepare, (q, k, v, h, g, g_gamma))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    _, rows, table = _table(cu_seqlens, B, T, chunk_size)
    bounds, _, table_rows = _parts(table)
    o = torch.empty_like(v)
    zero_outside(o, table)
    tiles, options = _tiles(q, K, V, chunk_size, configs.outputs)
    narrow = q.dtype == h.dtype == torch.bfloat16
    _outputs(
        (rows * HV * -(-V // tiles["BV"]),),
        (
            q, k, v, h, g, g_gamma, None, o, bounds, table_rows,
            float(K**-0.5 if scale is None else scale), T, B, H, HV, 0,
        ),
        tiles | {
            "USE_G": g is not None, "USE_G_GAMMA": g_gamma is not None,
            "GATE_DTYPE": gate_dtype(k),
            "DECAYED": False, "CUMULATIVE": True, "V_FIRST": state_v_first,
            "IS_VARLEN": table is not None, "PRECISION": _precision(q),
            "STATE_DTYPE": torch.bfloat16 if narrow else torch.float32,
        },
        **options,
    )  # fmt: skip
    return o
