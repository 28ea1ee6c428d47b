"""What the tokens of a delta family do to the state that enters them, by scans over their chunks.

    S <- Diag(decay) S + kg^T (U - W S)      on the columns [0 | I]: the state they leave of zeros,
                                             and the transfer matrix
    dS <- Diag(decay) dS + qg^T do - W^T (A_qk^T do + kg dS)
                                             the same back in time, for the gradient of the state

A program owns some columns, [K, BV] in fp32 registers, of one of the two results of a sequence and
head: U and do are zero for the transfer matrix.
"""

import triton
import triton.language as tl

from .rows import sequence_chunks
from .scan import state_pointers


@triton.jit
def summary_program(HV, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """(sequence, sequence and value head, value head, whether the columns are those of the state,
    their numbers) of a program."""
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BV - 1) // BV
    i_d = tl.program_id(0) % (NV + NK)
    i_nh = tl.program_id(0) // (NV + NK)
    of_state = i_d < NV
    o_d = tl.where(of_state, i_d, i_d - NV) * BV + tl.arange(0, BV)
    return i_nh // HV, i_nh, i_nh % HV, of_state, o_d


@triton.jit
def summary_pointers(
    state, transfer, i_nh, of_state, o_k, o_d, K: tl.constexpr, V: tl.constexpr
):
    """Pointers [BK, BV] of a program's columns, and their mask."""
    i_s = i_nh.to(tl.int64) * K
    if of_state:
        p_s = state_pointers(state, i_s * V, o_k, o_d, K, V, False)
    else:
        p_s = state_pointers(transfer, i_s * K, o_k, o_d, K, K, False)
    m_d = o_d < tl.where(of_state, V, K)
    return p_s, (o_k < K)[:, None] & m_d[None, :]


@triton.jit
def load_columns(p_s, m_s, is_first, of_state, o_k, o_d):
    """Columns [BK, BV] of [0 | I], or what an earlier launch left of them."""
    b_S = tl.load(p_s, mask=m_s & (is_first == 0), other=0.0)
    m_one = (o_k[:, None] == o_d[None, :]) & is_first & (of_state == 0)
    return tl.where(m_one, 1.0, b_S)


@triton.jit(do_not_specialize=["T", "B", "HV", "row0", "row1"])
def chunk_delta_fwd_kernel_summary(
    w,  # [rows', HV, BT, K]
    u,  # [B, T, HV, V]
    qg,  # [rows', HV, BT, K] or None
    kg,  # [rows', HV, BT, K]
    decay,  # [rows', HV, K] fp32
    A_qk,  # [B, T, HV, BT] or None
    o,  # [B, T, HV, V], written with OUTPUT: the outputs from a state of zeros; may be u itself
    read,  # [B, T, HV, K], written with OUTPUT: what the outputs read of the state that enters
    state,  # [N, HV, K, V] fp32, written; carries the result between launches
    transfer,  # [N, HV, K, K] fp32, the same
    bounds,  # [N+1] int64, read where B is 0
    offsets,  # [N+1] int32, the same
    T,
    B,  # 0: packed sequences
    HV,
    row0,
    row1,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OUTPUT: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """One program per (sequence, value head, columns); works on the table rows [row0, row1)."""
    i_n, i_nh, i_hv, of_state, o_d = summary_program(HV, K, V, BV)
    bos, b_len, first, c0, c1 = sequence_chunks(
        bounds, offsets, i_n, T, B, row0, row1, BT, B == 0
    )
    step = tl.maximum(B, 1)
    # no tokens: zeros and the identity, once
    if c1 <= c0:
        if (b_len > 0) | (row0 > 0):
            return
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    p_s, m_s = summary_pointers(state, transfer, i_nh, of_state, o_k, o_d, K, V)
    b_S = load_columns(p_s, m_s, c0 == 0, of_state, o_k, o_d)

    # one chunk ahead, as in scan.py
    o_first = (first + c0 * step - row0).to(tl.int64) * HV + i_hv
    b_decay = tl.load(decay + o_first * K + o_k, mask=m_k & (c0 < c1), other=0.0)
    for i_c in range(c0, c1):
        row = first + i_c * step
        o_r = (row - row0).to(tl.int64) * HV + i_hv
        p_decay = decay + (o_r + step * HV) * K + o_k
        b_next = tl.load(p_decay, mask=m_k & (i_c + 1 < c1), other=0.0)
        m_t = o_t < b_len - i_c * BT
        p_tk = o_r * BT * K + o_t[:, None] * K + o_k[None, :]
        o_thv = (bos + i_c * BT + o_t) * HV + i_hv
        o_tv = o_thv[:, None] * V + o_d[None, :]
        m_tv = m_t[:, None] & (o_d < V)[None, :] & of_state
        b_w = tl.load(w + p_tk, mask=m_k[None, :], other=0.0)
        b_u = tl.load(u + o_tv, mask=m_tv, other=0.0)
        b_kg = tl.load(kg + p_tk, mask=m_k[None, :], other=0.0)
        b_Sd = b_S.to(STATE_DTYPE)
        b_v = b_u - tl.dot(b_w.to(STATE_DTYPE), b_Sd, input_precision=PRECISION)
        b_vd = b_v.to(u.dtype.element_ty)
        if OUTPUT:
            b_qg = tl.load(qg + p_tk, mask=m_k[None, :], other=0.0)
            b_A = tl.load(
                A_qk + o_thv[:, None] * BT + o_t[None, :], mask=m_t[:, None], other=0.0
            )
            b_o = tl.dot(b_qg.to(STATE_DTYPE), b_Sd, input_precision=PRECISION)
            b_o = tl.dot(b_A, b_vd, b_o, input_precision=PRECISION).to(o.dtype.element_ty)
            tl.store(o + o_tv, b_o, mask=m_tv)
            m_tk = m_t[:, None] & (o_d < K)[None, :] & (of_state == 0)
            tl.store(read + o_thv[:, None] * K + o_d[None, :], b_o, mask=m_tk)
        b_S *= b_decay[:, None]
        b_S = tl.dot(tl.trans(b_kg), b_vd, b_S, input_precision=PRECISION)
        b_decay = b_next

    tl.store(p_s, b_S, mask=m_s)


@triton.jit(do_not_specialize=["T", "B", "HV", "row0", "row1"])
def chunk_delta_bwd_kernel_summary(
    w,  # [rows', HV, BT, K]
    qg,  # [rows', HV, BT, K]
    kg,  # [rows', HV, BT, K]
    decay,  # [rows', HV, K] fp32
    A_qk,  # [B, T, HV, BT]
    do,  # [B, T, HV, V]
    state,  # [N, HV, K, V] fp32, written; carries the result between launches
    transfer,  # [N, HV, K, K] fp32, the same
    bounds,  # [N+1] int64, read where B is 0
    offsets,  # [N+1] int32, the same
    T,
    B,  # 0: packed sequences
    HV,
    row0,
    row1,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Reverse in time; launches come with the last rows first."""
    i_n, i_nh, i_hv, of_state, o_d = summary_program(HV, K, V, BV)
    bos, b_len, first, c0, c1 = sequence_chunks(
        bounds, offsets, i_n, T, B, row0, row1, BT, B == 0
    )
    step = tl.maximum(B, 1)
    if c1 <= c0:
        if (b_len > 0) | (row0 > 0):
            return
    c1 = tl.maximum(c1, c0)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    p_s, m_s = summary_pointers(state, transfer, i_nh, of_state, o_k, o_d, K, V)
    b_dS = load_columns(p_s, m_s, c1 * BT >= b_len, of_state, o_k, o_d)
    dtype = do.dtype.element_ty

    # one chunk ahead
    o_last = (first + (c1 - 1) * step - row0).to(tl.int64) * HV + i_hv
    b_decay = tl.load(decay + o_last * K + o_k, mask=m_k & (c0 < c1), other=0.0)
    for i_back in range(c0, c1):
        i_c = c0 + c1 - 1 - i_back
        row = first + i_c * step
        o_r = (row - row0).to(tl.int64) * HV + i_hv
        b_next = tl.load(decay + (o_r - step * HV) * K + o_k, mask=m_k & (i_c > c0), other=0.0)
        m_t = o_t < b_len - i_c * BT
        o_thv = (bos + i_c * BT + o_t) * HV + i_hv
        p_tk = o_r * BT * K + o_t[:, None] * K + o_k[None, :]
        m_tv = m_t[:, None] & (o_d < V)[None, :] & of_state
        b_w = tl.load(w + p_tk, mask=m_k[None, :], other=0.0)
        b_qg = tl.load(qg + p_tk, mask=m_k[None, :], other=0.0)
        b_kg = tl.load(kg + p_tk, mask=m_k[None, :], other=0.0)
        b_do = tl.load(do + o_thv[:, None] * V + o_d[None, :], mask=m_tv, other=0.0)
        b_A = tl.load(A_qk + o_thv[:, None] * BT + o_t[None, :], mask=m_t[:, None], other=0.0)
        b_dv = tl.dot(b_kg.to(STATE_DTYPE), b_dS.to(STATE_DTYPE), input_precision=PRECISION)
        b_dv = tl.dot(tl.trans(b_A), b_do, b_dv, input_precision=PRECISION)
        b_dS *= b_decay[:, None]
        b_dS = tl.dot(tl.trans(b_qg), b_do, b_dS, input_precision=PRECISION)
        b_dS -= tl.dot(tl.trans(b_w), b_dv.to(dtype), input_precision=PRECISION)
        b_decay = b_next

    tl.store(p_s, b_dS, mask=m_s)
