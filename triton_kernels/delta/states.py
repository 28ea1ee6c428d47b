"""The WY factors and the chunk states of the delta families as stages of their own.

    W = A (beta exp(g) k)     U = A (beta v)
    V' = U - W S              S <- exp(g_last) S + (exp(g_last - g) k)^T V'

g are sums of log gates within the chunks, one a head (g), one a channel (gk), both or none, natural
logarithms. The state is stored before its update: h[i] enters chunk i.
"""

import triton
import triton.language as tl

from .gates import LOG2E
from .rows import chunk_position, sequence_chunks
from .scan import scan_program, state_pointers

# stands for the sum of gates after one of -inf: differences of two such sums are 0, not NaN
LOG2_SUM_FLOOR = tl.constexpr(-1e30)


@triton.jit
def load_sums(g, offsets, m_g):
    """In-chunk sums of gates in base 2, fp32; 0 where masked."""
    b_g = tl.load(g + offsets, mask=m_g, other=0.0).to(tl.float32) * LOG2E
    return tl.maximum(b_g, LOG2_SUM_FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["T", "B", "H", "HV"])
def recompute_w_u_kernel(
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    beta,  # [B, T, HV]
    A,  # [B, T, HV, BT]
    g,  # [B, T, HV] or None
    gk,  # [B, T, HV, K] or None
    w,  # [B, T, HV, K], written
    u,  # [B, T, HV, V], written
    bounds,  # [N+1] int64 or None
    table,  # [rows, 2] int32 or None
    T,
    B,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GK: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (chunk row, value head, slab); slabs of K come first, then those of V."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_s = tl.program_id(0) % (NK + NV)
    i_r = tl.program_id(0) // (NK + NV)
    row, i_hv = i_r // HV, i_r % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, IS_VARLEN)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    o_hv = (t0 + o_t) * HV + i_hv
    dtype = k.dtype.element_ty
    m_A = m_t[:, None] & (o_t < b_len)[None, :]
    b_A = tl.load(A + o_hv[:, None] * BT + o_t[None, :], mask=m_A, other=0.0).to(dtype)
    b_beta = tl.load(beta + o_hv, mask=m_t, other=0.0).to(tl.float32)
    if i_s >= NK:
        o_v = (i_s - NK) * BV + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        p_tv = o_hv[:, None] * V + o_v[None, :]
        b_v = tl.load(v + p_tv, mask=m_tv, other=0.0).to(tl.float32) * b_beta[:, None]
        b_u = tl.dot(b_A, b_v.to(dtype), input_precision=PRECISION)
        tl.store(u + p_tv, b_u.to(dtype), mask=m_tv)
    else:
        o_k = i_s * BK + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        p_k = k + (((t0 + o_t) * H + i_h) * K)[:, None] + o_k[None, :]
        p_gk = o_hv[:, None] * K + o_k[None, :]
        if USE_G:
            b_beta *= tl.exp2(load_sums(g, o_hv, m_t))
        b_k = tl.load(p_k, mask=m_tk, other=0.0).to(tl.float32) * b_beta[:, None]
        if USE_GK:
            b_k *= tl.exp2(load_sums(gk, p_gk, m_tk))
        b_w = tl.dot(b_A, b_k.to(dtype), input_precision=PRECISION)
        tl.store(w + p_gk, b_w.to(dtype), mask=m_tk)


@triton.jit(do_not_specialize=["T", "B", "H", "HV", "rows"])
def chunk_delta_fwd_kernel_h(
    k,  # [B, T, H, K]
    w,  # [B, T, HV, K]
    u,  # [B, T, HV, V]
    g,  # [B, T, HV] or None
    gk,  # [B, T, HV, K] or None
    h,  # [rows, HV, K, V] (or V first), written
    v_new,  # [B, T, HV, V], written
    h0,  # [N, HV, K, V] (or V first) or None
    ht,  # [N, HV, K, V] (or V first) fp32, written
    bounds,  # [N+1] int64 or None
    offsets,  # [N+1] int32 or None
    T,
    B,
    H,
    HV,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GK: tl.constexpr,
    HAS_H0: tl.constexpr,
    V_FIRST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """One program per (sequence, value head, V tile), which owns the state tile [K, BV]."""
    i_n, i_nh, i_hv, o_v = scan_program(HV, V, BV)
    i_h = i_hv // (HV // H)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, IS_VARLEN)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    dtype = u.dtype.element_ty

    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_H0:
        p_h0 = state_pointers(h0, o_s, o_k, o_v, K, V, V_FIRST)
        b_S = tl.load(p_h0, mask=m_s, other=0.0).to(tl.float32)

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    o_hk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    for i_c in range(0, c1):
        if IS_VARLEN:
            row = first + i_c
        else:
            row = i_c * B + i_n
        b_left = b_len - i_c * BT
        last = tl.minimum(b_left, BT) - 1
        m_t = o_t < b_left
        m_tk = m_t[:, None] & m_k[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        i_tok = bos + i_c * BT
        i_thv = i_tok * HV + i_hv
        # store before update: the state that enters the chunk
        p_h = state_pointers(h, (row.to(tl.int64) * HV + i_hv) * K * V, o_k, o_v, K, V, V_FIRST)
        tl.store(p_h, b_S.to(h.dtype.element_ty), mask=m_s)
        b_w = tl.load(w + i_thv * K + o_tk, mask=m_tk, other=0.0).to(STATE_DTYPE)
        b_u = tl.load(u + i_thv * V + o_tv, mask=m_tv, other=0.0)
        b_v = b_u - tl.dot(b_w, b_S.to(STATE_DTYPE), input_precision=PRECISION)
        tl.store(v_new + i_thv * V + o_tv, b_v.to(dtype), mask=m_tv)
        b_k = tl.load(k + (i_tok * H + i_h) * K + o_hk, mask=m_tk, other=0.0)
        if USE_G:
            b_last = load_sums(g, i_thv + last * HV, True)
            b_g = load_sums(g, i_thv + o_t * HV, m_t)
            b_v *= tl.exp2(tl.where(m_t, b_last - b_g, 0.0))[:, None]
            b_S *= tl.exp2(b_last)
        if USE_GK:
            b_last = load_sums(gk, (i_thv + last * HV) * K + o_k, m_k)
            b_g = load_sums(gk, i_thv * K + o_tk, m_tk)
            b_k = (b_k * tl.exp2(tl.where(m_tk, b_last[None, :] - b_g, 0.0))).to(dtype)
            b_S *= tl.exp2(b_last)[:, None]
        b_S = tl.dot(tl.trans(b_k), b_v.to(dtype), b_S, input_precision=PRECISION)

    p_ht = state_pointers(ht, o_s, o_k, o_v, K, V, V_FIRST)
    tl.store(p_ht, b_S, mask=m_s)
