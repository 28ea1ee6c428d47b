"""The scan over chunks of the delta families: states, corrected values and outputs.

    V' = U - W S      o = qg S + A_qk V'      S <- Diag(decay) S + kg^T V'

A program owns the state tile [K, BV] in fp32 registers and walks the chunks of one sequence and
head. W S contracts over all of K, so K is never split. The state is stored before its update: h[i]
enters chunk i.
"""

import triton
import triton.language as tl

from .rows import sequence_chunks


@triton.jit
def scan_program(HV, V: tl.constexpr, BV: tl.constexpr):
    """(sequence, sequence and value head, value head, channels of the V tile) of a program."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_nh = tl.program_id(0) // NV
    o_v = tl.program_id(0) % NV * BV + tl.arange(0, BV)
    return i_nh // HV, i_nh, i_nh % HV, o_v


@triton.jit
def state_pointers(x, base, o_k, o_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Pointers of a [BK, BV] tile of the state [K, V] (or [V, K]) that starts at x + base."""
    if V_FIRST:
        return x + base + o_v[None, :] * K + o_k[:, None]
    else:
        return x + base + o_k[:, None] * V + o_v[None, :]


@triton.jit(do_not_specialize=["T", "B", "HV", "row0", "row1", "has_h0", "has_ht"])
def chunk_delta_fwd_kernel_scan(
    w,  # [rows', HV, BT, K]
    u,  # [B, T, HV, V]
    qg,  # [rows', HV, BT, K] or None
    kg,  # [rows', HV, BT, K]
    decay,  # [rows', HV, K] fp32
    A_qk,  # [B, T, HV, BT] or None
    o,  # [B, T, HV, V], written with OUTPUT; may be u itself
    v_new,  # [B, T, HV, V], written with STORE_V; may be u itself
    h,  # [rows', HV, K, V], written with STORE_H
    h0,  # [N, HV, K, V] (or V first), read if has_h0
    ht,  # [N, HV, K, V] (or V first) fp32, written if has_ht; carries the state between launches
    bounds,  # [N+1] int64, read where B is 0
    offsets,  # [N+1] int32, the same
    T,
    B,  # 0: packed sequences
    HV,
    row0,
    row1,
    has_h0,
    has_ht,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OUTPUT: tl.constexpr,
    STORE_V: tl.constexpr,
    STORE_H: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """One program per (sequence, value head, V tile); works on the table rows [row0, row1)."""
    i_n, i_nh, i_hv, o_v = scan_program(HV, V, BV)
    bos, b_len, first, c0, c1 = sequence_chunks(
        bounds, offsets, i_n, T, B, row0, row1, BT, B == 0
    )
    step = tl.maximum(B, 1)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    # an empty sequence passes its initial state through, once
    m_empty = (b_len == 0) & (row0 == 0)
    if c1 <= c0:
        if not m_empty:
            return

    p_ht = state_pointers(ht, o_s, o_k, o_v, K, V, V_FIRST)
    m_ht = m_s & (has_ht != 0)
    if c0 == 0:
        p_h0 = state_pointers(h0, o_s, o_k, o_v, K, V, V_FIRST)
        b_S = tl.load(p_h0, mask=m_s & (has_h0 != 0), other=0.0).to(tl.float32)
    else:
        b_S = tl.load(p_ht, mask=m_ht, other=0.0)

    # one chunk ahead: nothing but this load would keep a chunk waiting for memory
    o_first = (first + c0 * step - row0).to(tl.int64) * HV + i_hv
    b_decay = tl.load(decay + o_first * K + o_k, mask=m_k & (c0 < c1), other=0.0)
    for i_c in range(c0, c1):
        row = first + i_c * step
        o_r = (row - row0).to(tl.int64) * HV + i_hv
        p_decay = decay + (o_r + step * HV) * K + o_k
        b_next = tl.load(p_decay, mask=m_k & (i_c + 1 < c1), other=0.0)
        m_t = o_t < b_len - i_c * BT
        if STORE_H:
            # store before update: the state that enters the chunk
            p_h = h + o_r * K * V + o_k[:, None] * V + o_v[None, :]
            tl.store(p_h, b_S.to(h.dtype.element_ty), mask=m_s)
        p_tk = o_r * BT * K + o_t[:, None] * K + o_k[None, :]
        o_tv = ((bos + i_c * BT + o_t) * HV + i_hv)[:, None] * V + o_v[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        b_w = tl.load(w + p_tk, mask=m_k[None, :], other=0.0)
        b_u = tl.load(u + o_tv, mask=m_tv, other=0.0)
        b_kg = tl.load(kg + p_tk, mask=m_k[None, :], other=0.0)
        b_Sd = b_S.to(STATE_DTYPE)
        b_v = b_u - tl.dot(b_w.to(STATE_DTYPE), b_Sd, input_precision=PRECISION)
        b_vd = b_v.to(u.dtype.element_ty)
        if OUTPUT:
            b_qg = tl.load(qg + p_tk, mask=m_k[None, :], other=0.0)
            o_A = ((bos + i_c * BT + o_t) * HV + i_hv)[:, None] * BT + o_t[None, :]
            b_A = tl.load(A_qk + o_A, mask=m_t[:, None], other=0.0)
            b_o = tl.dot(b_qg.to(STATE_DTYPE), b_Sd, input_precision=PRECISION)
            b_o = tl.dot(b_A, b_vd, b_o, input_precision=PRECISION)
            tl.store(o + o_tv, b_o.to(o.dtype.element_ty), mask=m_tv)
        if STORE_V:
            tl.store(v_new + o_tv, b_vd, mask=m_tv)
        b_S *= b_decay[:, None]
        b_S = tl.dot(tl.trans(b_kg), b_vd, b_S, input_precision=PRECISION)
        b_decay = b_next

    tl.store(p_ht, b_S, mask=m_ht)


@triton.jit(do_not_specialize=["T", "B", "HV", "rows", "want_dh0", "has_dht"])
def chunk_delta_bwd_kernel_scan(
    w,  # [rows, HV, BT, K]
    qg,  # [rows, HV, BT, K]
    kg,  # [rows, HV, BT, K]
    decay,  # [rows, HV, K] fp32
    A_qk,  # [B, T, HV, BT]
    do,  # [B, T, HV, V] or None
    dv_new,  # [B, T, HV, V], written: gradient of V'
    dh,  # [rows, HV, K, V], written: gradient of the state that leaves the chunk
    dht,  # [N, HV, K, V] (or V first), read if has_dht
    dh0,  # [N, HV, K, V] (or V first), written if want_dh0
    bounds,  # [N+1] int64, read where B is 0
    offsets,  # [N+1] int32, the same
    T,
    B,  # 0: packed sequences
    HV,
    rows,
    want_dh0,
    has_dht,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DO: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Reverse in time: dV' = A_qk^T do + kg dS,  dS <- Diag(decay) dS + qg^T do - W^T dV'."""
    i_n, i_nh, i_hv, o_v = scan_program(HV, V, BV)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, B == 0)
    step = tl.maximum(B, 1)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    dtype = dv_new.dtype.element_ty

    p_dht = state_pointers(dht, o_s, o_k, o_v, K, V, V_FIRST)
    b_dS = tl.load(p_dht, mask=m_s & (has_dht != 0), other=0.0).to(tl.float32)

    # one chunk ahead, as in the forward
    o_last = (first + (c1 - 1) * step).to(tl.int64) * HV + i_hv
    b_decay = tl.load(decay + o_last * K + o_k, mask=m_k & (c1 > 0), other=0.0)
    for i_back in range(0, c1):
        i_c = c1 - 1 - i_back
        row = first + i_c * step
        o_r = row.to(tl.int64) * HV + i_hv
        b_next = tl.load(decay + (o_r - step * HV) * K + o_k, mask=m_k & (i_c > 0), other=0.0)
        m_t = o_t < b_len - i_c * BT
        # store before update: the gradient of the state that leaves the chunk
        p_dh = dh + o_r * K * V + o_k[:, None] * V + o_v[None, :]
        tl.store(p_dh, b_dS.to(dh.dtype.element_ty), mask=m_s)
        p_tk = o_r * BT * K + o_t[:, None] * K + o_k[None, :]
        o_tv = ((bos + i_c * BT + o_t) * HV + i_hv)[:, None] * V + o_v[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        b_kg = tl.load(kg + p_tk, mask=m_k[None, :], other=0.0)
        b_w = tl.load(w + p_tk, mask=m_k[None, :], other=0.0)
        b_dSd = b_dS.to(STATE_DTYPE)
        b_dv = tl.dot(b_kg.to(STATE_DTYPE), b_dSd, input_precision=PRECISION)
        b_dS *= b_decay[:, None]
        if HAS_DO:
            b_do = tl.load(do + o_tv, mask=m_tv, other=0.0)
            b_qg = tl.load(qg + p_tk, mask=m_k[None, :], other=0.0)
            o_A = ((bos + i_c * BT + o_t) * HV + i_hv)[:, None] * BT + o_t[None, :]
            b_A = tl.load(A_qk + o_A, mask=m_t[:, None], other=0.0)
            b_dv = tl.dot(tl.trans(b_A), b_do, b_dv, input_precision=PRECISION)
            b_dS = tl.dot(tl.trans(b_qg), b_do, b_dS, input_precision=PRECISION)
        b_dvd = b_dv.to(dtype)
        tl.store(dv_new + o_tv, b_dvd, mask=m_tv)
        b_dS -= tl.dot(tl.trans(b_w), b_dvd, input_precision=PRECISION)
        b_decay = b_next

    p_dh0 = state_pointers(dh0, o_s, o_k, o_v, K, V, V_FIRST)
    tl.store(p_dh0, b_dS.to(dh0.dtype.element_ty), mask=m_s & (want_dh0 != 0))
