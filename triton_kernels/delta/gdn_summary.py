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
    q,  # [B, T, H, K], read with OUTPUT
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    A,  # [B, T, HV, BT]
    A_qk,  # [B, T, HV, BT]; None without OUTPUT
    tokens,  # [rows, HV, PARTS, BT] fp32
    decay,  # [rows, HV] fp32
    o,  # [B, T, HV, V], written with OUTPUT: the outputs from a state of zeros
    read,  # [B, T, HV, K], written with OUTPUT: what the outputs read of the state that enters
    state,  # [N, HV, K, V] fp32, written
    transfer,  # [N, HV, K, K] fp32, written
    bounds,  # [N+1] int64, read where B is 0
    offsets,  # [N+1] int32, the same
    T,
    B,  # 0: packed sequences
    H,
    HV,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OUTPUT: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """One program per (sequence, value head, columns)."""
    i_n, i_nh, i_hv, of_state, o_d = summary_program(HV, K, V, BV)
    i_h = i_hv // (HV // H)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, B == 0)
    step = tl.maximum(B, 1)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    p_s, m_s = summary_pointers(state, transfer, i_nh, of_state, o_k, o_d, K, V)
    b_S = load_columns(p_s, m_s, True, of_state, o_k, o_d)
    dtype = v.dtype.element_ty

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_d[None, :]
    o_A = o_t[:, None] * (HV * BT) + o_t[None, :]
    # one chunk ahead, as in scan.py: all that Triton would load in the place of its use
    o_first = first.to(tl.int64) * HV + i_hv
    b_decay = tl.load(decay + o_first, mask=c1 > 0, other=0.0)
    if OUTPUT:
        p_read = tokens + o_first * (PARTS * BT) + READ * BT + o_t
        b_read = tl.load(p_read, mask=c1 > 0, other=0.0)
    for i_c in range(0, c1):
        row = first + i_c * step
        o_r = row.to(tl.int64) * HV + i_hv
        o_next = o_r + step * HV
        b_next = tl.load(decay + o_next, mask=i_c + 1 < c1, other=0.0)
        m_t = o_t < b_len - i_c * BT
        i_tok = bos + i_c * BT
        i_thv = i_tok * HV + i_hv
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        m_tv = m_t[:, None] & (o_d < V)[None, :] & of_state
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
            b_o *= b_read[:, None]
            p_read = tokens + o_next * (PARTS * BT) + READ * BT + o_t
            b_read = tl.load(p_read, mask=i_c + 1 < c1, other=0.0)
            b_o = tl.dot(b_Aqk, b_vn.to(dtype), b_o, input_precision=PRECISION).to(dtype)
            tl.store(o + i_thv * V + o_tv, b_o, mask=m_tv)
            m_read = m_t[:, None] & (o_d < K)[None, :] & (of_state == 0)
            o_read = o_t[:, None] * (HV * K) + o_d[None, :]
            tl.store(read + i_thv * K + o_read, b_o, mask=m_read)
        b_vn = (b_vn * tl.load(p_x + WRITE * BT)[:, None]).to(dtype)
        b_S *= b_decay
        b_S = tl.dot(tl.trans(b_k), b_vn, b_S, input_precision=PRECISION)
        b_decay = b_next

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
    bounds,  # [N+1] int64, read where B is 0
    offsets,  # [N+1] int32, the same
    T,
    B,  # 0: packed sequences
    H,
    HV,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Reverse in time. One program per (sequence, value head, columns)."""
    i_n, i_nh, i_hv, of_state, o_d = summary_program(HV, K, V, BV)
    i_h = i_hv // (HV // H)
    bos, b_len, first, _, c1 = sequence_chunks(bounds, offsets, i_n, T, B, 0, rows, BT, B == 0)
    step = tl.maximum(B, 1)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    p_s, m_s = summary_pointers(state, transfer, i_nh, of_state, o_k, o_d, K, V)
    b_dS = load_columns(p_s, m_s, True, of_state, o_k, o_d)
    dtype = do.dtype.element_ty

    # offsets within a chunk in 32 bits, on a base that a scalar holds
    o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_d[None, :]
    o_A = o_t[:, None] * (HV * BT) + o_t[None, :]
    # one chunk ahead
    o_last = (first + (c1 - 1) * step).to(tl.int64) * HV + i_hv
    b_decay = tl.load(decay + o_last, mask=c1 > 0, other=0.0)
    p_write = tokens + o_last * (PARTS * BT) + WRITE * BT + o_t
    b_write = tl.load(p_write, mask=c1 > 0, other=0.0)
    for i_back in range(0, c1):
        i_c = c1 - 1 - i_back
        row = first + i_c * step
        o_r = row.to(tl.int64) * HV + i_hv
        o_next = o_r - step * HV
        b_next = tl.load(decay + o_next, mask=i_c > 0, other=0.0)
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
        b_dv *= b_write[:, None]
        p_write = tokens + o_next * (PARTS * BT) + WRITE * BT + o_t
        b_write = tl.load(p_write, mask=i_c > 0, other=0.0)
        b_dv = tl.dot(tl.trans(b_Aqk), b_do, b_dv, input_precision=PRECISION)
        b_do = (b_do * tl.load(p_x + READ * BT)[:, None]).to(dtype)
        b_dS *= b_decay
        b_dS = tl.dot(tl.trans(b_q), b_do, b_dS, input_precision=PRECISION)
        b_dR = tl.dot(tl.trans(b_A), b_dv.to(dtype), input_precision=PRECISION)
        b_erase = tl.load(p_x + ERASE * BT) * tl.load(p_x + BETA * BT)
        b_dR = (b_dR * -b_erase[:, None]).to(dtype)
        b_dS = tl.dot(tl.trans(b_k), b_dR, b_dS, input_precision=PRECISION)
        b_decay = b_next

    tl.store(p_s, b_dS, mask=m_s)
