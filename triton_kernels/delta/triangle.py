"""Inverses of the unit lower triangular matrices of chunks, and their gradient:

    X = (I + L)^-1            dL = -(X^T dX X^T), strictly lower
"""

import triton
import triton.language as tl

from .rows import chunk_position


@triton.jit(do_not_specialize=["T", "B", "H"])
def solve_tril_kernel(
    L,  # [B, T, H, BT]: row t holds its row of the chunk's matrix; only j < i is read
    X,  # [B, T, H, BT], written
    bounds,  # [N+1] int64 or None
    table,  # [rows, 2] int32 or None
    T,
    B,
    H,
    BT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """By forward substitution, row after row: X_i = e_i - sum_j L_ij X_j.

    One program per (chunk row, head). COMPUTE is float64 for float32 matrices: entries of the
    inverse reach 1e4 from entries of 1, and a merge of blocks in float32 loses twice what a
    triangular solve does.
    """
    row, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, IS_VARLEN)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    p_L = L + (t0 * H + i_h) * BT + o_t
    b_X = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0).to(COMPUTE)
    for i in range(1, tl.minimum(b_len, BT)):
        b_l = tl.load(p_L + i * (H * BT), mask=o_t < i, other=0.0).to(COMPUTE)
        b_x = tl.sum(b_l[:, None] * b_X, 0)
        b_X -= tl.where((o_t == i)[:, None], b_x[None, :], 0.0)
    p_X = X + (t0 * H + i_h) * BT + o_t[:, None] * (H * BT) + o_t[None, :]
    # columns past the end belong to no token
    b_X = tl.where((o_t < b_len)[None, :], b_X, 0.0)
    tl.store(p_X, b_X.to(X.dtype.element_ty), mask=(o_t < b_len)[:, None])


@triton.jit(do_not_specialize=["T", "B", "H"])
def solve_tril_bwd_kernel(
    X,  # [B, T, H, BT]
    dX,  # [B, T, H, BT]
    dL,  # [B, T, H, BT], written
    bounds,  # [N+1] int64 or None
    table,  # [rows, 2] int32 or None
    T,
    B,
    H,
    BT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """One program per (chunk row, head). Products of float32 operands, three TF32 products each."""
    row, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, IS_VARLEN)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    i_x = (t0 * H + i_h) * BT
    o_x = o_t[:, None] * (H * BT) + o_t[None, :]
    m_x = m_t[:, None] & (o_t[:, None] >= o_t[None, :])
    b_X = tl.trans(tl.load(X + i_x + o_x, mask=m_x, other=0.0).to(tl.float32))
    b_dX = tl.load(dX + i_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_dL = tl.dot(b_X, b_dX, input_precision="tf32x3")
    b_dL = tl.dot(b_dL, b_X, input_precision="tf32x3")
    b_dL = tl.where(o_t[:, None] > o_t[None, :], -b_dL, 0.0)
    tl.store(dL + i_x + o_x, b_dL.to(dL.dtype.element_ty), mask=m_t[:, None])
