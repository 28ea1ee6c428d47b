"""States of the decay families at the chunk boundaries, and their gradients backwards in time.

    S <- Diag(decay) S + K_g^T V                K_g: keys decayed to the chunk's end
    dS <- Diag(decay) dS + scale Q_g^T do       Q_g: queries decayed from the chunk's start

A program owns one [BK, BV] tile of the state in fp32 registers and walks the chunks of a sequence
and head. Both are stored before their update: h[i] is the state that enters chunk i, dh[i] the
gradient of the state that leaves it. With DECAYED the operands come decayed, with channel decays.
"""

import triton
import triton.language as tl

from ..delta.gates import LOG2E
from ..delta.rows import sequence_chunks
from ..delta.scan import state_pointers
from .rows import LOG2_SUM_FLOOR, decay_over, load_gamma, load_gates, sum_gates


@triton.jit
def channel_sums(g, i_thv, HV, o_d, m_t, last, o_t, D: tl.constexpr):
    """(in-chunk gate sums [BT, BD] in base 2, those at the last token [BD]) of [B, T, HV, D]."""
    m_g = m_t[:, None] & (o_d < D)[None, :]
    p_g = g + i_thv * D + o_t[:, None] * (HV * D) + o_d[None, :]
    b_g = tl.load(p_g, mask=m_g, other=0.0).to(tl.float32)
    b_g = tl.maximum(b_g * LOG2E, LOG2_SUM_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return b_g, tl.sum(tl.where((o_t == last)[:, None], b_g, 0.0), 0)


@triton.jit(do_not_specialize=["T", "B", "H", "HV", "row0", "row1", "every"])
def chunk_fwd_kernel_h(
    k,  # [B, T, H, K]; with DECAYED the decayed keys [rows', HV, BT, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV] or None: log gates, or their in-chunk sums with CUMULATIVE
    g_gamma,  # [HV] or None
    gk,  # [B, T, HV, K] or None: in-chunk sums of log gates
    gv,  # [B, T, HV, V] or None: in-chunk sums of log gates
    decay,  # [rows', HV, K] fp32 with DECAYED, else None
    h,  # [rows', HV, K, V] (or V first with H_V_FIRST), written with STORE_H
    h0,  # [N, HV, K, V] (or V first) or None
    ht,  # [N, HV, K, V] (or V first) fp32, written with STORE_FINAL
    carry_in,  # [B, HV, K, V] fp32 (packed: [1, ...]): state of sequences that began before row0
    carry_out,  # the same, written: state of sequences that go on after row1
    bounds,  # [N+1] int64 or None
    offsets,  # [N+1] int32 or None
    splits,  # [N+1] int32 with SPLIT and IS_VARLEN: pieces of `every` chunks before a sequence
    T,
    B,
    H,
    HV,
    row0,
    row1,
    every,  # with SPLIT, h has a row for every so many chunks of a sequence
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    GATE_DTYPE: tl.constexpr,
    USE_GK: tl.constexpr,
    USE_GV: tl.constexpr,
    DECAYED: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    STORE_H: tl.constexpr,
    SPLIT: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    HAS_H0: tl.constexpr,
    V_FIRST: tl.constexpr,
    H_V_FIRST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (sequence, value head, tile of the state); rows [row0, row1)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_k = tl.program_id(0) % NV, tl.program_id(0) // NV % NK
    i_nh = tl.program_id(0) // (NV * NK)
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    bos, b_len, first, c0, c1 = sequence_chunks(
        bounds, offsets, i_n, T, B, row0, row1, BT, IS_VARLEN
    )
    # an empty sequence passes its initial state through, once
    if c1 <= c0:
        if (b_len > 0) | (row0 > 0):
            return
    c1 = tl.maximum(c1, c0)
    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    if IS_VARLEN:
        o_carry = i_hv.to(tl.int64) * K * V
    else:
        o_carry = o_s
    dtype = v.dtype.element_ty

    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if c0 == 0:
        if HAS_H0:
            p_h0 = state_pointers(h0, o_s, o_k, o_v, K, V, V_FIRST)
            b_S = tl.load(p_h0, mask=m_s, other=0.0).to(tl.float32)
    else:
        p_in = state_pointers(carry_in, o_carry, o_k, o_v, K, V, False)
        b_S = tl.load(p_in, mask=m_s, other=0.0)

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
        o_r = (row - row0).to(tl.int64) * HV + i_hv
        b_left = b_len - i_c * BT
        m_t = o_t < b_left
        i_tok = bos + i_c * BT
        i_thv = i_tok * HV + i_hv
        if STORE_H:
            # store before update: the state that enters the chunk
            if SPLIT:
                if IS_VARLEN:
                    piece = tl.load(splits + i_n) + i_c // every
                else:
                    piece = i_c // every * B + i_n
                o_h = (piece.to(tl.int64) * HV + i_hv) * K * V
                m_h = m_s & (i_c % every == 0)
            else:
                o_h = o_r * K * V
                m_h = m_s
            p_h = state_pointers(h, o_h, o_k, o_v, K, V, H_V_FIRST)
            tl.store(p_h, b_S.to(h.dtype.element_ty), mask=m_h)
        if DECAYED:
            b_k = tl.load(k + o_r * BT * K + o_tk, mask=m_k[None, :], other=0.0)
        else:
            m_tk = m_t[:, None] & m_k[None, :]
            b_k = tl.load(k + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
        b_v = tl.load(v + i_thv * V + o_tv, mask=m_t[:, None] & m_v[None, :], other=0.0)
        if DECAYED:
            b_decay = tl.load(decay + o_r * K + o_k, mask=m_k, other=0.0)
            b_S *= b_decay[:, None]
        if USE_G or USE_G_GAMMA:
            b_G, b_last = sum_gates(b_g, b_gamma, o_t, b_left, BT, USE_G, CUMULATIVE, GATE_DTYPE)
            # the next chunk's gates, which no product waits for
            b_g = load_gates(g, i_thv + BT * HV, o_g, o_t < b_left - BT, BT, USE_G)
            b_v = (b_v * decay_over(b_last - b_G)[:, None]).to(dtype)
            b_S *= decay_over(b_last)
        last = tl.minimum(b_left, BT) - 1
        if USE_GK:
            b_Gk, b_lastk = channel_sums(gk, i_thv, HV, o_k, m_t, last, o_t, K)
            b_k = (b_k * tl.exp2(tl.where(m_t[:, None], b_lastk[None, :] - b_Gk, 0.0))).to(dtype)
            b_S *= tl.exp2(b_lastk)[:, None]
        if USE_GV:
            b_Gv, b_lastv = channel_sums(gv, i_thv, HV, o_v, m_t, last, o_t, V)
            b_v = (b_v * tl.exp2(tl.where(m_t[:, None], b_lastv[None, :] - b_Gv, 0.0))).to(dtype)
            b_S *= tl.exp2(b_lastv)[None, :]
        b_S = tl.dot(tl.trans(b_k), b_v, b_S, input_precision=PRECISION)

    if c1 * BT >= b_len:
        if STORE_FINAL:
            p_ht = state_pointers(ht, o_s, o_k, o_v, K, V, V_FIRST)
            tl.store(p_ht, b_S, mask=m_s)
    else:
        p_out = state_pointers(carry_out, o_carry, o_k, o_v, K, V, False)
        tl.store(p_out, b_S, mask=m_s)


@triton.jit(do_not_specialize=["scale", "T", "B", "H", "HV", "row0", "row1"])
def chunk_bwd_kernel_dh(
    q,  # [B, T, H, K]; with DECAYED the decayed, scaled queries [rows', HV, BT, K]
    do,  # [B, T, HV, V] or None
    g,  # [B, T, HV] or None
    g_gamma,  # [HV] or None
    decay,  # [rows', HV, K] fp32 with DECAYED, else None
    dh,  # [rows', HV, K, V], written: gradient of the state that leaves the chunk
    dht,  # [N, HV, K, V] (or V first) or None
    dh0,  # [N, HV, K, V] (or V first), written with STORE_DH0
    carry_in,  # [B, HV, K, V] fp32 (packed: [1, ...]): gradient from after row1
    carry_out,  # the same, written: gradient of the states that enter at row0
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
    HAS_DO: tl.constexpr,
    HAS_DHT: tl.constexpr,
    STORE_DH0: tl.constexpr,
    V_FIRST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Reverse in time. One program per (sequence, value head, tile of the state)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_k = tl.program_id(0) % NV, tl.program_id(0) // NV % NK
    i_nh = tl.program_id(0) // (NV * NK)
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    bos, b_len, first, c0, c1 = sequence_chunks(
        bounds, offsets, i_n, T, B, row0, row1, BT, IS_VARLEN
    )
    if c1 <= c0:
        if (b_len > 0) | (row0 > 0):
            return
    c1 = tl.maximum(c1, c0)
    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    if IS_VARLEN:
        o_carry = i_hv.to(tl.int64) * K * V
    else:
        o_carry = o_s

    b_dS = tl.zeros([BK, BV], dtype=tl.float32)
    if c1 * BT >= b_len:
        if HAS_DHT:
            p_dht = state_pointers(dht, o_s, o_k, o_v, K, V, V_FIRST)
            b_dS = tl.load(p_dht, mask=m_s, other=0.0).to(tl.float32)
    else:
        p_in = state_pointers(carry_in, o_carry, o_k, o_v, K, V, False)
        b_dS = tl.load(p_in, mask=m_s, other=0.0)

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    if DECAYED:
        o_tk = o_t[:, None] * K + o_k[None, :]
    else:
        o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_g = o_t * HV
    b_gamma = load_gamma(g_gamma, i_hv, USE_G_GAMMA)
    i_last = (bos + (c1 - 1) * BT) * HV + i_hv
    # none of an empty sequence, whose last chunk would lie before its start
    m_last = (o_t < b_len - (c1 - 1) * BT) & (c1 > c0)
    b_g = load_gates(g, i_last, o_g, m_last, BT, USE_G)
    for i_back in range(c0, c1):
        i_c = c0 + c1 - 1 - i_back
        if IS_VARLEN:
            row = first + i_c
        else:
            row = i_c * B + i_n
        o_r = (row - row0).to(tl.int64) * HV + i_hv
        b_left = b_len - i_c * BT
        m_t = o_t < b_left
        i_tok = bos + i_c * BT
        i_thv = i_tok * HV + i_hv
        # store before update: the gradient of the state that leaves the chunk
        p_dh = state_pointers(dh, o_r * K * V, o_k, o_v, K, V, False)
        tl.store(p_dh, b_dS.to(dh.dtype.element_ty), mask=m_s)
        if DECAYED:
            b_decay = tl.load(decay + o_r * K + o_k, mask=m_k, other=0.0)
            b_dS *= b_decay[:, None]
        b_row = tl.zeros([BT], dtype=tl.float32) + scale
        if USE_G or USE_G_GAMMA:
            b_G, b_last = sum_gates(b_g, b_gamma, o_t, b_left, BT, USE_G, False, GATE_DTYPE)
            # the gates of the chunk before, which no product waits for
            b_g = load_gates(g, i_thv - BT * HV, o_g, o_t < (i_c - c0) * BT, BT, USE_G)
            b_row *= decay_over(b_G)
            b_dS *= decay_over(b_last)
        if HAS_DO:
            m_tv = m_t[:, None] & m_v[None, :]
            b_do = tl.load(do + i_thv * V + o_tv, mask=m_tv, other=0.0)
            if DECAYED:
                b_q = tl.load(q + o_r * BT * K + o_tk, mask=m_k[None, :], other=0.0)
            else:
                m_tk = m_t[:, None] & m_k[None, :]
                b_q = tl.load(q + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
                b_do = (b_do * b_row[:, None]).to(do.dtype.element_ty)
            b_dS = tl.dot(tl.trans(b_q), b_do, b_dS, input_precision=PRECISION)

    if c0 == 0:
        if STORE_DH0:
            p_dh0 = state_pointers(dh0, o_s, o_k, o_v, K, V, V_FIRST)
            tl.store(p_dh0, b_dS.to(dh0.dtype.element_ty), mask=m_s)
    else:
        p_out = state_pointers(carry_out, o_carry, o_k, o_v, K, V, False)
        tl.store(p_out, b_dS, mask=m_s)
