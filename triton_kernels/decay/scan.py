"""States and outputs of the decay families in one pass over the chunks; no state is written.

    o = scale Q_g S + A V        A_ij = scale (q_i . k_j) decay from j to i, j <= i
    S <- Diag(decay) S + K_g^T V

A program owns the transposed state tile [BV, K] in fp32 registers and walks the chunks of one
sequence and head: so the state is a product's register operand, and needs no shared memory. With
DECAYED the operands Q_g, K_g and A come ready, with channel decays.
"""

import triton
import triton.language as tl

from ..delta.rows import sequence_chunks
from ..delta.scan import state_pointers
from .rows import decay_over, load_gamma, load_gates, pair_decay, sum_gates


@triton.jit(do_not_specialize=["scale", "T", "B", "H", "HV", "row0", "row1"])
def chunk_fwd_kernel_scan(
    q,  # [B, T, H, K]; with DECAYED the decayed, scaled queries [rows', HV, BT, K]
    k,  # [B, T, H, K]; with DECAYED the decayed keys [rows', HV, BT, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV] or None
    g_gamma,  # [HV] or None
    decay,  # [rows', HV, K] fp32 with DECAYED, else None
    A,  # [B, T, HV, BT] with DECAYED, else None
    o,  # [B, T, HV, V], written
    h0,  # [N, HV, K, V] (or V first) or None
    ht,  # [N, HV, K, V] (or V first) fp32, written; carries the state between launches
    bounds,  # [N+1] int64 or None
    offsets,  # [N+1] int32 or None
    scale,
    T,
    B,
    H,
    HV,
    row0,
    row1,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    GATE_DTYPE: tl.constexpr,
    DECAYED: tl.constexpr,
    HAS_H0: tl.constexpr,
    V_FIRST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """One program per (sequence, value head, V tile); works on rows [row0, row1)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_nh = tl.program_id(0) // NV
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    bos, b_len, first, c0, c1 = sequence_chunks(
        bounds, offsets, i_n, T, B, row0, row1, BT, IS_VARLEN
    )
    # an empty sequence passes its initial state through, once
    if c1 <= c0:
        if (b_len > 0) | (row0 > 0):
            return
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_v[:, None] & m_k[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    dtype = v.dtype.element_ty

    b_S = tl.zeros([BV, BK], dtype=tl.float32)
    if c0 == 0:
        if HAS_H0:
            p_h0 = state_pointers(h0, o_s, o_v, o_k, V, K, not V_FIRST)
            b_S = tl.load(p_h0, mask=m_s, other=0.0).to(tl.float32)
    else:
        p_ht = state_pointers(ht, o_s, o_v, o_k, V, K, not V_FIRST)
        b_S = tl.load(p_ht, mask=m_s, other=0.0)

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    if DECAYED:
        o_tk = o_t[:, None] * K + o_k[None, :]
    else:
        o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_g = o_t * HV
    b_gamma = load_gamma(g_gamma, i_hv, USE_G_GAMMA)
    i_first = (bos + c0 * BT) * HV + i_hv
    b_g = load_gates(g, i_first, o_g, o_t < b_len - c0 * BT, BT, USE_G)
    for i_c in range(c0, c1):
        if IS_VARLEN:
            row = first + i_c
        else:
            row = i_c * B + i_n
        b_left = b_len - i_c * BT
        m_t = o_t < b_left
        i_tok = bos + i_c * BT
        i_thv = i_tok * HV + i_hv
        m_tv = m_t[:, None] & m_v[None, :]
        if DECAYED:
            o_r = (row - row0).to(tl.int64) * HV + i_hv
            i_qk = o_r * BT * K
            m_qk = m_k[None, :]
        else:
            i_qk = (i_tok * H + i_h) * K
            m_qk = m_t[:, None] & m_k[None, :]
        b_q = tl.load(q + i_qk + o_tk, mask=m_qk, other=0.0)
        b_k = tl.load(k + i_qk + o_tk, mask=m_qk, other=0.0)
        b_v = tl.load(v + i_thv * V + o_tv, mask=m_tv, other=0.0)
        # pairs first: their registers are free again before the outputs need some
        if DECAYED:
            p_A = A + i_thv * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
            b_AT = tl.trans(tl.load(p_A, mask=m_t[:, None], other=0.0))
        else:
            # transposed: [j, i]
            b_AT = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale
            m_pair = o_t[:, None] <= o_t[None, :]
            if USE_G or USE_G_GAMMA:
                b_G, b_last = sum_gates(b_g, b_gamma, o_t, b_left, BT, USE_G, False, GATE_DTYPE)
                # the next chunk's gates, which no product waits for
                b_g = load_gates(g, i_thv + BT * HV, o_g, o_t < b_left - BT, BT, USE_G)
                b_AT *= pair_decay(b_G[None, :], b_G[:, None], m_pair, True)
            else:
                b_AT = tl.where(m_pair, b_AT, 0.0)
            b_AT = b_AT.to(dtype)
        b_oT = tl.dot(b_S.to(STATE_DTYPE), tl.trans(b_q.to(STATE_DTYPE)), input_precision=PRECISION)
        if DECAYED:
            b_decay = tl.load(decay + o_r * K + o_k, mask=m_k, other=0.0)
            b_S *= b_decay[None, :]
        elif USE_G or USE_G_GAMMA:
            b_oT *= (decay_over(b_G) * scale)[None, :]
            b_S *= decay_over(b_last)
        else:
            b_oT *= scale
        b_oT = tl.dot(tl.trans(b_v), b_AT, b_oT, input_precision=PRECISION)
        tl.store(o + i_thv * V + o_tv, tl.trans(b_oT.to(dtype)), mask=m_tv)
        if USE_G or USE_G_GAMMA:
            b_v = (b_v * decay_over(b_last - b_G)[:, None]).to(dtype)
        b_S = tl.dot(tl.trans(b_v), b_k, b_S, input_precision=PRECISION)

    p_ht = state_pointers(ht, o_s, o_v, o_k, V, K, not V_FIRST)
    tl.store(p_ht, b_S, mask=m_s)
