"""Sums of log gates within the chunks: y_t = scale sum of x_s over s <= t (or s >= t) of its chunk.
"""

import triton
import triton.language as tl

from ..delta.rows import chunk_position


@triton.jit(do_not_specialize=["scale", "T", "B", "D"])
def chunk_local_cumsum_kernel(
    x,  # [B, T, D]
    y,  # [B, T, D] fp32, written
    bounds,  # [N+1] int64 or None
    table,  # [rows, 2] int32 or None
    scale,
    T,
    B,
    D,  # heads, or heads times channels
    BT: tl.constexpr,
    BD: tl.constexpr,
    REVERSE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """One program per (row, BD columns)."""
    ND = tl.cdiv(D, BD)
    row, i_d = tl.program_id(0) // ND, tl.program_id(0) % ND
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, IS_VARLEN)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    m_x = (o_t < b_len)[:, None] & (o_d < D)[None, :]
    o_x = (t0 + o_t)[:, None] * D + o_d[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    # a native reverse scan: total minus prefix cancels
    b_y = tl.cumsum(b_x, 0, reverse=REVERSE) * scale
    tl.store(y + o_x, b_y, mask=m_x)
