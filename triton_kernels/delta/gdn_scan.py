"""The scans over chunks of the delta families with a scalar gate or none, W and U never formed.

    R = beta (v - erase k S)    V' = A R    o = read (q S) + Aqk V'    S <- decay S + k^T (write V')

with the factors of scalar.py. A program owns the state tile [K, BV] in fp32 registers and walks the
chunks of one sequence and head, as those of scan.py do.
"""

import triton
import triton.language as tl

from .rows import sequence_chunks
from .scalar import BETA, ERASE, PARTS, READ, WRITE
from .scan import scan_program, state_pointers


@triton.jit(do_not_specialize=["T", "B", "H", "HV", "rows", "has_h0"])
def chunk_gdn_fwd_kernel_scan(
    q,  # [B, T, H, K]; None without OUTPUT
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    A,  # [B, T, HV, BT]
    A_qk,  # [B, T, HV, BT]; None without OUTPUT
    tokens,  # [rows, HV, PARTS, BT] fp32
    decay,  # [rows, HV] fp32
    o,  # [B, T, HV, V], written with OUTPUT
    v_new,  # [B, T, HV, V], written with STORE_V
    h,  # [rows, HV, K, V], written with STORE_H
    h0,  # [N, HV, K, V] (or V first), read if has_h0
    ht,  # [N, HV, K, V] (or V first) fp32, written with STORE_FINAL
    bounds,  # [N+1] int64, read where B is 0
    offsets,  # [N+1] int32, the same
    T,
    B,  # 0: packed sequences
    H,
    HV,
    rows,
    has_h0,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OUTPUT: tl.constexpr,
    STORE_V: tl.constexpr,
    STORE_H: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """One program per (sequence, value head, V tile)."""
    i_n, i_nh, i_hv, o_v = scan_program(HV, V, BV)
    i_h = i_hv // (HV // H)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, B == 0)
    step = tl.maximum(B, 1)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    dtype = v.dtype.element_ty

    p_h0 = state_pointers(h0, o_s, o_k, o_v, K, V, V_FIRST)
    b_S = tl.load(p_h0, mask=m_s & (has_h0 != 0), other=0.0).to(tl.float32)

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_A = o_t[:, None] * (HV * BT) + o_t[None, :]
    for i_c in range(0, c1):
        row = first + i_c * step
        o_r = row.to(tl.int64) * HV + i_hv
        m_t = o_t < b_len - i_c * BT
        i_tok = bos + i_c * BT
        i_thv = i_tok * HV + i_hv
        m_tk = m_t[:, None] & m_k[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        if STORE_H:
            # store before update: the state that enters the chunk
            p_h = h + o_r * K * V + o_k[:, None] * V + o_v[None, :]
            tl.store(p_h, b_S.to(h.dtype.element_ty), mask=m_s)
        p_x = tokens + o_r * (PARTS * BT) + o_t
        b_k = tl.load(k + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
        b_v = tl.load(v + i_thv * V + o_tv, mask=m_tv, other=0.0)
        b_A = tl.load(A + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
        b_Sd = b_S.to(STATE_DTYPE)
        b_R = tl.dot(b_k.to(STATE_DTYPE), b_Sd, input_precision=PRECISION)
        b_R = b_v.to(tl.float32) - b_R * tl.load(p_x + ERASE * BT)[:, None]
        b_R = (b_R * tl.load(p_x + BETA * BT)[:, None]).to(dtype)
        b_vn = tl.dot(b_A, b_R, input_precision=PRECISION)
        if OUTPUT:
            b_q = tl.load(q + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
            b_Aqk = tl.load(A_qk + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
            b_o = tl.dot(b_q.to(STATE_DTYPE), b_Sd, input_precision=PRECISION)
            b_o *= tl.load(p_x + READ * BT)[:, None]
            b_o = tl.dot(b_Aqk, b_vn.to(dtype), b_o, input_precision=PRECISION)
            tl.store(o + i_thv * V + o_tv, b_o.to(dtype), mask=m_tv)
        if STORE_V:
            tl.store(v_new + i_thv * V + o_tv, b_vn.to(dtype), mask=m_tv)
        b_vn = (b_vn * tl.load(p_x + WRITE * BT)[:, None]).to(dtype)
        b_S *= tl.load(decay + o_r)
        b_S = tl.dot(tl.trans(b_k), b_vn, b_S, input_precision=PRECISION)

    if STORE_FINAL:
        p_ht = state_pointers(ht, o_s, o_k, o_v, K, V, V_FIRST)
        tl.store(p_ht, b_S, mask=m_s)


@triton.jit(do_not_specialize=["T", "B", "H", "HV", "rows", "want_dh0", "has_dht"])
def chunk_gdn_bwd_kernel_scan(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    A,  # [B, T, HV, BT]
    A_qk,  # [B, T, HV, BT]
    tokens,  # [rows, HV, PARTS, BT] fp32
    decay,  # [rows, HV] fp32
    do,  # [B, T, HV, V] or None
    dR,  # [B, T, HV, V], written: gradient of R
    dh,  # [rows, HV, K, V], written: gradient of the state that leaves the chunk
    dht,  # [N, HV, K, V] (or V first), read if has_dht
    dh0,  # [N, HV, K, V] (or V first), written if want_dh0
    bounds,  # [N+1] int64, read where B is 0
    offsets,  # [N+1] int32, the same
    T,
    B,  # 0: packed sequences
    H,
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
    """Reverse in time: dV' = Aqk^T do + write (k dS), dR = A^T dV',
    dS <- decay dS + q^T (read do) - k^T (erase beta dR)."""
    i_n, i_nh, i_hv, o_v = scan_program(HV, V, BV)
    i_h = i_hv // (HV // H)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, B == 0)
    step = tl.maximum(B, 1)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    dtype = dR.dtype.element_ty

    p_dht = state_pointers(dht, o_s, o_k, o_v, K, V, V_FIRST)
    b_dS = tl.load(p_dht, mask=m_s & (has_dht != 0), other=0.0).to(tl.float32)

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_A = o_t[:, None] * (HV * BT) + o_t[None, :]
    for i_back in range(0, c1):
        i_c = c1 - 1 - i_back
        row = first + i_c * step
        o_r = row.to(tl.int64) * HV + i_hv
        m_t = o_t < b_len - i_c * BT
        i_tok = bos + i_c * BT
        i_thv = i_tok * HV + i_hv
        m_tk = m_t[:, None] & m_k[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        # store before update: the gradient of the state that leaves the chunk
        p_dh = dh + o_r * K * V + o_k[:, None] * V + o_v[None, :]
        tl.store(p_dh, b_dS.to(dh.dtype.element_ty), mask=m_s)
        p_x = tokens + o_r * (PARTS * BT) + o_t
        b_k = tl.load(k + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
        b_A = tl.load(A + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
        b_dSd = b_dS.to(STATE_DTYPE)
        b_dv = tl.dot(b_k.to(STATE_DTYPE), b_dSd, input_precision=PRECISION)
        b_dv *= tl.load(p_x + WRITE * BT)[:, None]
        b_dS *= tl.load(decay + o_r)
        if HAS_DO:
            b_q = tl.load(q + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
            b_do = tl.load(do + i_thv * V + o_tv, mask=m_tv, other=0.0)
            b_Aqk = tl.load(A_qk + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
            b_dv = tl.dot(tl.trans(b_Aqk), b_do, b_dv, input_precision=PRECISION)
            b_do = (b_do * tl.load(p_x + READ * BT)[:, None]).to(dtype)
            b_dS = tl.dot(tl.trans(b_q), b_do, b_dS, input_precision=PRECISION)
        b_dR = tl.dot(tl.trans(b_A), b_dv.to(dtype), input_precision=PRECISION)
        tl.store(dR + i_thv * V + o_tv, b_dR.to(dtype), mask=m_tv)
        b_erase = tl.load(p_x + ERASE * BT) * tl.load(p_x + BETA * BT)
        b_dR = (b_dR * -b_erase[:, None]).to(dtype)
        b_dS = tl.dot(tl.trans(b_k), b_dR, b_dS, input_precision=PRECISION)

    p_dh0 = state_pointers(dh0, o_s, o_k, o_v, K, V, V_FIRST)
    tl.store(p_dh0, b_dS.to(dh0.dtype.element_ty), mask=m_s & (want_dh0 != 0))
