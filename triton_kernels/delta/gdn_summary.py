"""Summaries of summary.py for a scalar gate or none, W and U never formed.

    R = beta (v - erase k S)    S <- decay S + k^T (write A R)
    dR = A^T (Aqk^T do + write (k dS))    dS <- decay dS + q^T (read do) - k^T (erase beta dR)

with the factors of scalar.py, on the columns [0 | I]: v and do are zero for the transfer matrix.
"""

import triton
import triton.language as tl

from .rows import sequence_chunks
from .scalar import BETA, ERASE, PARTS, READ, WRITE
from .summary import load_columns, summary_pointers, summary_program


@triton.jit(do_not_specialize=["T", "B", "H", "HV", "rows"])
def chunk_gdn_fwd_kernel_summary(
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    A,  # [B, T, HV, BT]
    tokens,  # [rows, HV, PARTS, BT] fp32
    decay,  # [rows, HV] fp32
    state,  # [N, HV, K, V] fp32, written
    transfer,  # [N, HV, K, K] fp32, written
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
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """One program per (sequence, value head, columns)."""
    i_n, i_nh, i_hv, of_state, o_d = summary_program(HV, K, V, BV)
    i_h = i_hv // (HV // H)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, IS_VARLEN)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    p_s, m_s = summary_pointers(state, transfer, i_nh, of_state, o_k, o_d, K, V)
    b_S = load_columns(p_s, m_s, True, of_state, o_k, o_d)
    dtype = v.dtype.element_ty

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_d[None, :]
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
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        m_tv = m_t[:, None] & (o_d < V)[None, :] & of_state
        p_x = tokens + o_r * (PARTS * BT) + o_t
        b_k = tl.load(k + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
        b_v = tl.load(v + i_thv * V + o_tv, mask=m_tv, other=0.0)
        b_A = tl.load(A + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
        b_R = tl.dot(b_k.to(STATE_DTYPE), b_S.to(STATE_DTYPE), input_precision=PRECISION)
        b_R = b_v.to(tl.float32) - b_R * tl.load(p_x + ERASE * BT)[:, None]
        b_R = (b_R * tl.load(p_x + BETA * BT)[:, None]).to(dtype)
        b_vn = tl.dot(b_A, b_R, input_precision=PRECISION)
        b_vn = (b_vn * tl.load(p_x + WRITE * BT)[:, None]).to(dtype)
        b_S *= tl.load(decay + o_r)
        b_S = tl.dot(tl.trans(b_k), b_vn, b_S, input_precision=PRECISION)

    tl.store(p_s, b_S, mask=m_s)


@triton.jit(do_not_specialize=["T", "B", "H", "HV", "rows"])
def chunk_gdn_bwd_kernel_summary(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    A,  # [B, T, HV, BT]
    A_qk,  # [B, T, HV, BT]
    tokens,  # [rows, HV, PARTS, BT] fp32
    decay,  # [rows, HV] fp32
    do,  # [B, T, HV, V]
    state,  # [N, HV, K, V] fp32, written
    transfer,  # [N, HV, K, K] fp32, written
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
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Reverse in time. One program per (sequence, value head, columns)."""
    i_n, i_nh, i_hv, of_state, o_d = summary_program(HV, K, V, BV)
    i_h = i_hv // (HV // H)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, IS_VARLEN)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    p_s, m_s = summary_pointers(state, transfer, i_nh, of_state, o_k, o_d, K, V)
    b_dS = load_columns(p_s, m_s, True, of_state, o_k, o_d)
    dtype = do.dtype.element_ty

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_d[None, :]
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
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        m_tv = m_t[:, None] & (o_d < V)[None, :] & of_state
        p_x = tokens + o_r * (PARTS * BT) + o_t
        b_q = tl.load(q + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
        b_k = tl.load(k + (i_tok * H + i_h) * K + o_tk, mask=m_tk, other=0.0)
        b_do = tl.load(do + i_thv * V + o_tv, mask=m_tv, other=0.0)
        b_A = tl.load(A + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
        b_Aqk = tl.load(A_qk + i_thv * BT + o_A, mask=m_t[:, None], other=0.0)
        b_dv = tl.dot(b_k.to(STATE_DTYPE), b_dS.to(STATE_DTYPE), input_precision=PRECISION)
        b_dv *= tl.load(p_x + WRITE * BT)[:, None]
        b_dv = tl.dot(tl.trans(b_Aqk), b_do, b_dv, input_precision=PRECISION)
        b_do = (b_do * tl.load(p_x + READ * BT)[:, None]).to(dtype)
        b_dS *= tl.load(decay + o_r)
        b_dS = tl.dot(tl.trans(b_q), b_do, b_dS, input_precision=PRECISION)
        b_dR = tl.dot(tl.trans(b_A), b_dv.to(dtype), input_precision=PRECISION)
        b_erase = tl.load(p_x + ERASE * BT) * tl.load(p_x + BETA * BT)
        b_dR = (b_dR * -b_erase[:, None]).to(dtype)
        b_dS = tl.dot(tl.trans(b_k), b_dR, b_dS, input_precision=PRECISION)

    tl.store(p_s, b_dS, mask=m_s)
