"""Gradients of the decay families within the chunks.

    dA = mask(do V^T)         dq = scale (decay . do h^T) + (dA . decays) K
    dk = decays to the end . V dh^T + (dA . decays)^T Q
    dv = A^T do + K_g dh

The gradient of the gates has a closed form: the gate of a token gets the pairs that straddle it, a
suffix sum over the chunk of what it reads from the state that enters, a sum over the tokens before
it of what they write into the state that leaves, and <S, dS> through the whole chunk.
h holds the states that enter the chunks, dh the gradients of those that leave them.
"""

import triton
import triton.language as tl

from ..delta.gates import LOG2_GATE_FLOOR, LOG2E
from ..delta.rows import chunk_position
from ..delta.scalar import states_product
from .rows import decay_over, load_gamma, load_gates, pair_decay, sum_gates


@triton.jit(do_not_specialize=["scale", "T", "B", "H", "HV", "row0"])
def chunk_bwd_kernel_qk(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    do,  # [B, T, HV, V] or None
    h,  # [rows', HV, K, V]
    dh,  # [rows', HV, K, V]
    g,  # [B, T, HV] or None
    g_gamma,  # [HV] or None
    dq,  # [B, T, HV, K], written
    dk,  # [B, T, HV, K], written
    dv,  # [B, T, HV, V], written with STORE_DV
    dg,  # [NK, B, T, HV], written with STORE_DG: the part of each slab of K
    dg_gamma,  # [rows, HV, NK] fp32, written with STORE_DG_GAMMA: sums over the chunk
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
    HAS_DO: tl.constexpr,
    STORE_DV: tl.constexpr,
    STORE_DG: tl.constexpr,
    STORE_DG_GAMMA: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """dq, dk, parts of dg, and dv where a program holds all of K.

    One program per (row, value head, slab of K).
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    USE_DECAY: tl.constexpr = USE_G or USE_G_GAMMA
    tl.static_assert(NK == 1 or not STORE_DV)
    i_s = tl.program_id(0) % NK
    i_r = tl.program_id(0) // NK
    row, i_hv = row0 + i_r // HV, i_r % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, IS_VARLEN)
    if STORE_DG_GAMMA:
        p_sum = dg_gamma + (row.to(tl.int64) * HV + i_hv) * NK + i_s
    if b_len <= 0:
        # partial sums of rows that hold no chunk
        if STORE_DG_GAMMA:
            tl.store(p_sum, 0.0)
        return
    i_S = i_r.to(tl.int64) * K * V
    o_t = tl.arange(0, BT)
    o_k = i_s * BK + tl.arange(0, BK)
    m_t = o_t < b_len
    m_k = o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    # offsets within a chunk in 32 bits, on a base that a scalar holds
    i_thv = t0 * HV + i_hv
    i_qk = (t0 * H + i_h) * K
    o_qk = o_t[:, None] * (H * K) + o_k[None, :]
    dtype = q.dtype.element_ty

    b_G = tl.zeros([BT], dtype=GATE_DTYPE)
    b_last = tl.zeros([], dtype=GATE_DTYPE)
    b_gates = load_gates(g, i_thv, o_t * HV, m_t, BT, USE_G)
    b_gates += load_gamma(g_gamma, i_hv, USE_G_GAMMA)
    if USE_DECAY:
        b_G, b_last = sum_gates(b_gates, 0.0, o_t, b_len, BT, USE_G, False, GATE_DTYPE)
    # of keys to the chunk's end; rows past the end hold zeros
    b_end = decay_over(b_last - b_G)
    b_q = tl.load(q + i_qk + o_qk, mask=m_tk, other=0.0)
    b_k = tl.load(k + i_qk + o_qk, mask=m_tk, other=0.0)
    # dv by itself first: fewer registers at a time, and what it reads again comes from the cache
    if STORE_DV:
        if HAS_DO:
            # transposed: [j, i]
            b_AT = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale
            m_upper = o_t[:, None] <= o_t[None, :]
            b_AT = (b_AT * pair_decay(b_G[None, :], b_G[:, None], m_upper, USE_DECAY)).to(dtype)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
            m_tv = m_t[:, None] & (o_v < V)[None, :]
            o_S = o_k[:, None] * V + o_v[None, :]
            m_S = m_k[:, None] & (o_v < V)[None, :]
            b_dS = tl.load(dh + i_S + o_S, mask=m_S, other=0.0).to(STATE_DTYPE)
            b_dv = tl.dot(b_k.to(STATE_DTYPE), b_dS, input_precision=PRECISION) * b_end[:, None]
            if HAS_DO:
                b_do = tl.load(do + i_thv * V + o_tv, mask=m_tv, other=0.0)
                b_dv = tl.dot(b_AT, b_do, b_dv, input_precision=PRECISION)
            tl.store(dv + i_thv * V + o_tv, b_dv.to(dv.dtype.element_ty), mask=m_tv)

    b_dA = tl.zeros([BT, BT], dtype=tl.float32)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    if STORE_DG or STORE_DG_GAMMA:
        b_states = states_product(h, dh, i_S, o_k, m_k, V, BV)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = o_v < V
        o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        o_S = o_k[:, None] * V + o_v[None, :]
        m_S = m_k[:, None] & m_v[None, :]
        b_v = tl.load(v + i_thv * V + o_tv, mask=m_tv, other=0.0)
        b_dS = tl.load(dh + i_S + o_S, mask=m_S, other=0.0)
        if HAS_DO:
            b_S = tl.load(h + i_S + o_S, mask=m_S, other=0.0)
        b_dS = b_dS.to(STATE_DTYPE)
        b_dk = tl.dot(b_v.to(STATE_DTYPE), tl.trans(b_dS), b_dk, input_precision=PRECISION)
        if HAS_DO:
            b_do = tl.load(do + i_thv * V + o_tv, mask=m_tv, other=0.0)
            b_dA = tl.dot(b_do, tl.trans(b_v), b_dA, input_precision=PRECISION)
            b_S = tl.trans(b_S.to(STATE_DTYPE))
            b_dq = tl.dot(b_do.to(STATE_DTYPE), b_S, b_dq, input_precision=PRECISION)

    b_dk *= b_end[:, None]
    if STORE_DG or STORE_DG_GAMMA:
        # what a token's gate does to the leaving state: it decays the tokens before it
        b_written = tl.sum(b_k.to(tl.float32) * b_dk, 1)
        m_before = o_t[None, :] < o_t[:, None]
        b_leaving = tl.sum(tl.where(m_before, b_written[None, :], 0.0), 1)
        b_leaving += b_states * decay_over(b_last)
    if HAS_DO:
        b_dq *= (decay_over(b_G) * scale)[:, None]
        m_causal = o_t[:, None] >= o_t[None, :]
        b_dA *= pair_decay(b_G[:, None], b_G[None, :], m_causal, USE_DECAY) * scale
        if STORE_DG or STORE_DG_GAMMA:
            # pairs that straddle the token
            b_P = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_dA
            b_P = tl.where(o_t[:, None] > o_t[None, :], b_P, 0.0)
            b_dG = tl.sum(b_P, 1) - tl.sum(b_P, 0) + tl.sum(b_q.to(tl.float32) * b_dq, 1)
            b_leaving += tl.cumsum(b_dG, 0, reverse=True)
        b_dA = b_dA.to(dtype)
        b_dq = tl.dot(b_dA, b_k, b_dq, input_precision=PRECISION)
        b_dk = tl.dot(tl.trans(b_dA), b_q, b_dk, input_precision=PRECISION)
    i_gk = i_thv * K
    o_gk = o_t[:, None] * (HV * K) + o_k[None, :]
    tl.store(dq + i_gk + o_gk, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + i_gk + o_gk, b_dk.to(dk.dtype.element_ty), mask=m_tk)
    if STORE_DG or STORE_DG_GAMMA:
        # a gate at its floor has no slope
        b_dg = tl.where(m_t & (b_gates * LOG2E > LOG2_GATE_FLOOR), b_leaving, 0.0)
        if STORE_DG:
            p_dg = dg + i_s.to(tl.int64) * B * T * HV + i_thv + o_t * HV
            tl.store(p_dg, b_dg.to(dg.dtype.element_ty), mask=m_t)
        if STORE_DG_GAMMA:
            tl.store(p_sum, tl.sum(b_dg))


@triton.jit(do_not_specialize=["scale", "T", "B", "H", "HV", "row0"])
def chunk_bwd_kernel_v(
    k,  # [B, T, H, K]; with DECAYED the decayed keys [rows', HV, BT, K]
    q,  # [B, T, H, K]; None with DECAYED
    do,  # [B, T, HV, V] or None
    dh,  # [rows', HV, K, V]
    g,  # [B, T, HV] or None
    g_gamma,  # [HV] or None
    A,  # [B, T, HV, BT] with DECAYED, else None
    dv,  # [B, T, HV, V], written
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
    HAS_DO: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """dv alone. One program per (row, value head, V tile)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    USE_DECAY: tl.constexpr = USE_G or USE_G_GAMMA
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
    i_thv = t0 * HV + i_hv
    i_qk = (t0 * H + i_h) * K
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    dtype = dv.dtype.element_ty

    b_gamma = load_gamma(g_gamma, i_hv, USE_G_GAMMA)
    b_g = load_gates(g, i_thv, o_t * HV, m_t, BT, USE_G)
    b_dv = tl.zeros([BT, BV], dtype=tl.float32)
    b_AT = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        if DECAYED:
            p_k = k + o_r * BT * K + o_t[:, None] * K + o_k[None, :]
            b_k = tl.load(p_k, mask=m_k[None, :], other=0.0)
        else:
            o_qk = o_t[:, None] * (H * K) + o_k[None, :]
            m_qk = m_t[:, None] & m_k[None, :]
            b_k = tl.load(k + i_qk + o_qk, mask=m_qk, other=0.0)
            if HAS_DO:
                # transposed: [j, i]
                b_q = tl.load(q + i_qk + o_qk, mask=m_qk, other=0.0)
                b_AT = tl.dot(b_k, tl.trans(b_q), b_AT, input_precision=PRECISION)
        p_dS = dh + o_r * K * V + o_k[:, None] * V + o_v[None, :]
        b_dS = tl.load(p_dS, mask=m_k[:, None] & m_v[None, :], other=0.0).to(STATE_DTYPE)
        b_dv = tl.dot(b_k.to(STATE_DTYPE), b_dS, b_dv, input_precision=PRECISION)

    b_G = tl.zeros([BT], dtype=GATE_DTYPE)
    if USE_DECAY:
        b_G, b_last = sum_gates(b_g, b_gamma, o_t, b_len, BT, USE_G, False, GATE_DTYPE)
        b_dv *= decay_over(b_last - b_G)[:, None]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    m_tv = m_t[:, None] & m_v[None, :]
    if HAS_DO:
        if DECAYED:
            p_A = A + i_thv * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
            b_AT = tl.trans(tl.load(p_A, mask=m_t[:, None], other=0.0))
        else:
            m_upper = o_t[:, None] <= o_t[None, :]
            b_AT *= pair_decay(b_G[None, :], b_G[:, None], m_upper, USE_DECAY) * scale
            b_AT = b_AT.to(dtype)
        b_do = tl.load(do + i_thv * V + o_tv, mask=m_tv, other=0.0)
        b_dv = tl.dot(b_AT, b_do, b_dv, input_precision=PRECISION)
    tl.store(dv + i_thv * V + o_tv, b_dv.to(dtype), mask=m_tv)


@triton.jit(do_not_specialize=["n", "D", "G"])
def sum_heads_kernel(
    x,  # [tokens, H, G, D] fp32: gradients per value head
    y,  # [tokens, H, D], written
    n,  # tokens * H * D
    D,
    G,
    BN: tl.constexpr,
):
    """Sums over the value heads of a group in fp32, in order. BN elements a program."""
    o_y = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m_y = o_y < n
    p_x = x + o_y // D * G * D + o_y % D
    b_y = tl.zeros([BN], dtype=tl.float32)
    for i_g in range(0, G):
        b_y += tl.load(p_x + i_g * D, mask=m_y, other=0.0)
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_y)
