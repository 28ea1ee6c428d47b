"""Within one chunk of the delta families with a scalar gate or none: pair matrices and factors.

With G the in-chunk inclusive sum of the log gate (base 2) and rq, rk the reciprocal norms of the
rows (1 without the L2 norm), for rows i and columns j:

    L_ij   = beta_i rk_i rk_j (k_i . k_j) decay from j to i,    i > j       A = (I + L)^-1
    Aqk_ij = scale rq_i rk_j (q_i . k_j) decay from j to i,     i >= j

A scalar gate leaves the products of raw rows as they are: what the scans multiply them by is one
factor a token (scalar.py), and W and U need no memory.
"""

import triton
import triton.language as tl

from .gates import L2NORM_EPS
from .pairs import unit_lower_inverse
from .rows import chunk_position
from .scalar import (
    AFTER,
    BEFORE,
    BETA,
    ERASE,
    GATE,
    NORM_K,
    NORM_Q,
    PARTS,
    READ,
    WRITE,
    pair_decays,
)


@triton.jit(do_not_specialize=["scale", "T", "B", "H", "HV"])
def chunk_gdn_fwd_kernel_pairs(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    A,  # [B, T, HV, BT], written with PAIRS
    A_qk,  # [B, T, HV, BT], written with PAIRS
    tokens,  # [rows, HV, PARTS, BT] fp32, parts NORM_Q to WRITE written
    bounds,  # [N+1] int64, read where B is 0
    table,  # [rows, 2] int32, the same
    scale,
    T,
    B,  # 0: packed sequences
    H,
    HV,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PAIRS: tl.constexpr,
    USE_G: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_DTYPE: tl.constexpr,
):
    """Norms and factors, with PAIRS both matrices. One program per (chunk row, value head)."""
    row, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, B == 0)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    i_thv = t0 * HV + i_hv
    i_qk = (t0 * H + i_h) * K
    o_qk = o_t[:, None] * (H * K)
    dtype = q.dtype.element_ty

    b_rq = tl.zeros([BT], dtype=tl.float32)
    b_rk = tl.zeros([BT], dtype=tl.float32)
    b_Aqk = tl.zeros([BT, BT], dtype=tl.float32)
    b_L = tl.zeros([BT, BT], dtype=tl.float32)
    if PAIRS or USE_L2NORM:
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_tk = m_t[:, None] & (o_k < K)[None, :]
            b_q = tl.load(q + i_qk + o_qk + o_k[None, :], mask=m_tk, other=0.0)
            b_k = tl.load(k + i_qk + o_qk + o_k[None, :], mask=m_tk, other=0.0)
            if USE_L2NORM:
                b_q32, b_k32 = b_q.to(tl.float32), b_k.to(tl.float32)
                b_rq += tl.sum(b_q32 * b_q32, 1)
                b_rk += tl.sum(b_k32 * b_k32, 1)
            if PAIRS:
                b_kT = tl.trans(b_k)
                b_Aqk = tl.dot(b_q, b_kT, b_Aqk, input_precision=PRECISION)
                b_L = tl.dot(b_k, b_kT, b_L, input_precision=PRECISION)
    if USE_L2NORM:
        b_rq = tl.rsqrt(b_rq + L2NORM_EPS)
        b_rk = tl.rsqrt(b_rk + L2NORM_EPS)
    else:
        b_rq += 1.0
        b_rk += 1.0
    p_x = tokens + (row.to(tl.int64) * HV + i_hv) * (PARTS * BT)
    b_before = tl.load(p_x + BEFORE * BT + o_t)
    b_after = tl.load(p_x + AFTER * BT + o_t)
    if USE_L2NORM:
        tl.store(p_x + NORM_Q * BT + o_t, b_rq)
        tl.store(p_x + NORM_K * BT + o_t, b_rk)
    tl.store(p_x + READ * BT + o_t, b_before * b_rq * scale)
    tl.store(p_x + ERASE * BT + o_t, b_before * b_rk)
    tl.store(p_x + WRITE * BT + o_t, b_after * b_rk)

    if PAIRS:
        b_P = pair_decays(p_x + GATE * BT, o_t[:, None] >= o_t[None, :], BT, USE_G)
        b_P *= b_rk[None, :]
        o_A = o_t[:, None] * (HV * BT) + o_t[None, :]
        b_Aqk *= b_P * (b_rq * scale)[:, None]
        tl.store(A_qk + i_thv * BT + o_A, b_Aqk.to(dtype), mask=m_t[:, None])
        b_L *= b_P * (b_rk * tl.load(p_x + BETA * BT + o_t))[:, None]
        b_L = tl.where(o_t[:, None] > o_t[None, :], b_L, 0.0)
        b_A = unit_lower_inverse(b_L, BT, INVERSE_DTYPE)
        tl.store(A + i_thv * BT + o_A, b_A.to(dtype), mask=m_t[:, None])
