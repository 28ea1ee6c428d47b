"""Outputs of the decay families from the states that enter the chunks.

    o = scale Q_g S + A V        A_ij = scale (q_i . k_j) decay from j to i, j <= i

Time is in the grid, K the inner loop; A stays in registers. With DECAYED the operands Q_g and A
come ready, with channel decays.
"""

import triton
import triton.language as tl

from ..delta.rows import chunk_position
from ..delta.scan import state_pointers
from .rows import decay_over, load_gamma, load_gates, pair_decay, sum_gates


@triton.jit(do_not_specialize=["scale", "T", "B", "H", "HV", "row0"])
def chunk_fwd_kernel_o(
    q,  # [B, T, H, K]; with DECAYED the decayed, scaled queries [rows', HV, BT, K]
    k,  # [B, T, H, K]; None with DECAYED
    v,  # [B, T, HV, V]
    h,  # [rows', HV, K, V] (or V first): states that enter the chunks
    g,  # [B, T, HV] or None: log gates, or their in-chunk sums with CUMULATIVE
    g_gamma,  # [HV] or None
    A,  # [B, T, HV, BT] with DECAYED, else None
    o,  # [B, T, HV, V], written
    bounds,  # [N+1] int64 or None
    table,  # [rows, 2] int32 or None
    scale,
    T,
    B,
    H,
    HV,
    row0,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    GATE_DTYPE: tl.constexpr,
    DECAYED: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    V_FIRST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """One program per (row, value head, V tile)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_r = tl.program_id(0) // NV
    row, i_hv = row0 + i_r // HV, i_r % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, IS_VARLEN)
    if b_len <= 0:
        return
    o_r = i_r.to(tl.int64)
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    # offsets within a chunk in 32 bits, on a base that a scalar holds
    i_thv = t0 * HV + i_hv
    i_qk = (t0 * H + i_h) * K
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    dtype = v.dtype.element_ty

    b_gamma = load_gamma(g_gamma, i_hv, USE_G_GAMMA)
    b_g = load_gates(g, i_thv, o_t * HV, m_t, BT, USE_G)
    b_o = tl.zeros([BT, BV], dtype=tl.float32)
    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        if DECAYED:
            p_q = q + o_r * BT * K + o_t[:, None] * K + o_k[None, :]
            b_q = tl.load(p_q, mask=m_k[None, :], other=0.0)
        else:
            o_qk = o_t[:, None] * (H * K) + o_k[None, :]
            m_qk = m_t[:, None] & m_k[None, :]
            b_q = tl.load(q + i_qk + o_qk, mask=m_qk, other=0.0)
            b_k = tl.load(k + i_qk + o_qk, mask=m_qk, other=0.0)
            b_A = tl.dot(b_q, tl.trans(b_k), b_A, input_precision=PRECISION)
        p_h = state_pointers(h, o_r * K * V, o_k, o_v, K, V, V_FIRST)
        b_S = tl.load(p_h, mask=m_k[:, None] & m_v[None, :], other=0.0).to(STATE_DTYPE)
        b_o = tl.dot(b_q.to(STATE_DTYPE), b_S, b_o, input_precision=PRECISION)

    if DECAYED:
        p_A = A + i_thv * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
        b_A = tl.load(p_A, mask=m_t[:, None], other=0.0)
    else:
        m_causal = o_t[:, None] >= o_t[None, :]
        if USE_G or USE_G_GAMMA:
            b_G, _ = sum_gates(b_g, b_gamma, o_t, b_len, BT, USE_G, CUMULATIVE, GATE_DTYPE)
            b_A *= pair_decay(b_G[:, None], b_G[None, :], m_causal, True) * scale
            b_o *= (decay_over(b_G) * scale)[:, None]
        else:
            b_A = tl.where(m_causal, b_A * scale, 0.0)
            b_o *= scale
        b_A = b_A.to(dtype)
    i_v = i_thv * V
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    m_tv = m_t[:, None] & m_v[None, :]
    b_v = tl.load(v + i_v + o_tv, mask=m_tv, other=0.0)
    b_o = tl.dot(b_A, b_v, b_o, input_precision=PRECISION)
    tl.store(o + i_v + o_tv, b_o.to(dtype), mask=m_tv)
