"""The scans over chunks of the delta families with a scalar gate or none, W and U never formed.

    R = beta (v - erase k S)    V' = A R    o = read (q S) + Aqk V'    S <- decay S + k^T (write V')

with the factors of scalar.py. A program owns the transposed state tile [BV, K] in fp32 registers
and walks the chunks of one sequence and head: the state, R and V' are then the register operands of
the products they go into, and the chain through a chunk passes no shared memory.
"""

import triton
import triton.language as tl

from .rows import sequence_chunks
from .scalar import BETA, ERASE, PARTS, READ, WRITE
from .scan import state_pointers


@triton.jit(do_not_specialize=["T", "B", "H", "HV", "rows"])
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
    h0,  # [N, HV, K, V] (or V first) or None
    ht,  # [N, HV, K, V] (or V first) fp32, written with STORE_FINAL
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
    OUTPUT: tl.constexpr,
    STORE_V: tl.constexpr,
    STORE_H: tl.constexpr,
    HAS_H0: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    V_FIRST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """One program per (sequence, value head, V tile)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_nh = tl.program_id(0) // NV
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, IS_VARLEN)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_v[:, None] & m_k[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    dtype = v.dtype.element_ty

    b_S = tl.zeros([BV, BK], dtype=tl.float32)
    if HAS_H0:
        p_h0 = state_pointers(h0, o_s, o_v, o_k, V, K, not V_FIRST)
        b_S = tl.load(p_h0, mask=m_s, other=0.0).to(tl.float32)

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_A = o_t[:, None] * (HV * BT) + o_t[None, :]
    for i_c in range(0, c1):
        if IS_VARLEN:
            row = first + i_c
        else:
            row = i_c * B + i_n
        o_r = row.to(tl.int64) * HV + i_hv
        m_t = o_t < b_len - i_c * BT
        i_tok = bos + i_c * BT
        i_thv = i_tok * HV + i_hv
        m_tk = m_t[:, None] & m_k[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        if STORE_H:
            # store before update: the state that enters the chunk
            p_h = h + o_r * K * V + o_k[:, None] * V + o_v[None, :]
            b_h = tl.trans(b_S.to(h.dtype.element_ty))
            tl.store(p_h, b_h, mask=m_k[:, None] & m_v[None, :])
        # every load stands where its value is needed: so late do its registers fill
        p_x = tokens + o_r * (PARTS * BT) + o_t
        b_k = tl.load(k + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
        b_Sd = b_S.to(STATE_DTYPE)
        b_R = tl.dot(b_Sd, tl.trans(b_k.to(STATE_DTYPE)), input_precision=PRECISION)
        b_v = tl.load(v + i_thv * V + o_tv, mask=m_tv, other=0.0)
        b_R = tl.trans(b_v).to(tl.float32) - b_R * tl.load(p_x + ERASE * BT)[None, :]
        b_R = (b_R * tl.load(p_x + BETA * BT)[None, :]).to(dtype)
        b_A = tl.load(A + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
        b_S *= tl.load(decay + o_r)
        b_vn = tl.dot(b_R, tl.trans(b_A), input_precision=PRECISION)
        if OUTPUT:
            b_q = tl.load(q + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
            b_o = tl.dot(b_Sd, tl.trans(b_q.to(STATE_DTYPE)), input_precision=PRECISION)
            b_o *= tl.load(p_x + READ * BT)[None, :]
            b_Aqk = tl.load(A_qk + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
            b_o = tl.dot(b_vn.to(dtype), tl.trans(b_Aqk), b_o, input_precision=PRECISION)
            tl.store(o + i_thv * V + o_tv, tl.trans(b_o.to(dtype)), mask=m_tv)
        if STORE_V:
            tl.store(v_new + i_thv * V + o_tv, tl.trans(b_vn.to(dtype)), mask=m_tv)
        b_vn = (b_vn * tl.load(p_x + WRITE * BT)[None, :]).to(dtype)
        b_S = tl.dot(b_vn, b_k, b_S, input_precision=PRECISION)

    if STORE_FINAL:
        p_ht = state_pointers(ht, o_s, o_v, o_k, V, K, not V_FIRST)
        tl.store(p_ht, b_S, mask=m_s)


@triton.jit(do_not_specialize=["T", "B", "H", "HV", "rows"])
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
    dht,  # [N, HV, K, V] (or V first) or None
    dh0,  # [N, HV, K, V] (or V first), written with STORE_DH0
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
    HAS_DO: tl.constexpr,
    HAS_DHT: tl.constexpr,
    STORE_DH0: tl.constexpr,
    V_FIRST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Reverse in time: dV' = Aqk^T do + write (k dS), dR = A^T dV',
    dS <- decay dS + q^T (read do) - k^T (erase beta dR)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_nh = tl.program_id(0) // NV
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, IS_VARLEN)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_v[:, None] & m_k[None, :]
    o_s = i_nh.to(tl.int64) * K * V
    dtype = dR.dtype.element_ty

    b_dS = tl.zeros([BV, BK], dtype=tl.float32)
    if HAS_DHT:
        p_dht = state_pointers(dht, o_s, o_v, o_k, V, K, not V_FIRST)
        b_dS = tl.load(p_dht, mask=m_s, other=0.0).to(tl.float32)

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_A = o_t[:, None] * (HV * BT) + o_t[None, :]
    for i_back in range(0, c1):
        i_c = c1 - 1 - i_back
        if IS_VARLEN:
            row = first + i_c
        else:
            row = i_c * B + i_n
        o_r = row.to(tl.int64) * HV + i_hv
        m_t = o_t < b_len - i_c * BT
        i_tok = bos + i_c * BT
        i_thv = i_tok * HV + i_hv
        m_tk = m_t[:, None] & m_k[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        # store before update: the gradient of the state that leaves the chunk
        p_dh = dh + o_r * K * V + o_k[:, None] * V + o_v[None, :]
        b_dh = tl.trans(b_dS.to(dh.dtype.element_ty))
        tl.store(p_dh, b_dh, mask=m_k[:, None] & m_v[None, :])
        b_k = tl.load(k + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
        b_A = tl.load(A + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
        p_x = tokens + o_r * (PARTS * BT) + o_t
        b_write = tl.load(p_x + WRITE * BT)
        b_erase = tl.load(p_x + ERASE * BT) * tl.load(p_x + BETA * BT)
        b_decay = tl.load(decay + o_r)
        b_dv = tl.dot(
            b_dS.to(STATE_DTYPE), tl.trans(b_k.to(STATE_DTYPE)), input_precision=PRECISION
        )
        b_dv *= b_write[None, :]
        b_dS *= b_decay
        if HAS_DO:
            b_do = tl.load(do + i_thv * V + o_tv, mask=m_tv, other=0.0)
            b_q = tl.load(q + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
            b_Aqk = tl.load(A_qk + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
            b_read = tl.load(p_x + READ * BT)
            b_doT = tl.trans(b_do)
            b_dv = tl.dot(b_doT, b_Aqk, b_dv, input_precision=PRECISION)
            b_doT = (b_doT * b_read[None, :]).to(dtype)
            b_dS = tl.dot(b_doT, b_q, b_dS, input_precision=PRECISION)
        b_dR = tl.dot(b_dv.to(dtype), b_A, input_precision=PRECISION)
        tl.store(dR + i_thv * V + o_tv, tl.trans(b_dR.to(dtype)), mask=m_tv)
        b_dR = (b_dR * -b_erase[None, :]).to(dtype)
        b_dS = tl.dot(b_dR, b_k, b_dS, input_precision=PRECISION)

    if STORE_DH0:
        p_dh0 = state_pointers(dh0, o_s, o_v, o_k, V, K, not V_FIRST)
        tl.store(p_dh0, b_dS.to(dh0.dtype.element_ty), mask=m_s)
