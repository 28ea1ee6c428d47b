"""Within one chunk of gla: decayed queries and keys and the matrix of token pairs.

With G the in-chunk inclusive sum of the log gate, for rows i and columns j <= i:

    A_ij = scale sum_d q_id k_jd exp(G_id - G_jd)
    qg = scale q exp(G)      kg = k exp(G_last - G)      decay = exp(G_last)

Pairs are grouped by the dyadic levels of delta/pairs.py, whose factors are products of decays of
tokens (tokens.py): at most 1, however fast a channel forgets, and never of later tokens.
"""

import triton
import triton.language as tl

from ..delta.pairs import level_mask
from ..delta.rows import chunk_position
from .tokens import (
    BLOCK,
    BLOCKS,
    block_decays,
    by_block,
    decays_before,
    join_tokens,
    load_decays,
    load_tokens,
    prefix_decays,
    suffix_decays,
)


@triton.jit
def add_pairs(b_A, b_x, b_y, LEVEL: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Adds the pairs of one level; b_x, b_y [BT, BK] are decayed rows and columns."""
    b_p = tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
    return b_A + tl.where(level_mask(LEVEL, BT), b_p, 0.0)


@triton.jit
def add_near_pairs(
    b_A, b_q, b_k, b_decay, LEVEL: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of a level within blocks, of tuples of tokens. What meets no mask is 0."""
    dtype = b_q[0].dtype
    b_zero = tl.zeros(b_q[0].shape, dtype=dtype)
    b_row, b_column = prefix_decays(b_decay, LEVEL), suffix_decays(b_decay, LEVEL)
    b_x = ()
    b_y = ()
    for i in tl.static_range(BLOCK):
        if i // LEVEL % 2 == 1:
            b_x = b_x + ((b_q[i] * b_row[i]).to(dtype),)
            b_y = b_y + (b_zero,)
        else:
            b_x = b_x + (b_zero,)
            b_y = b_y + ((b_k[i] * b_column[i]).to(dtype),)
    return add_pairs(b_A, join_tokens(b_x, BK), join_tokens(b_y, BK), LEVEL, BT, PRECISION)


@triton.jit
def add_far_pairs(
    b_A, b_q, b_k, b_row, b_column, blocks, LEVEL: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of a level between blocks; blocks are their decays."""
    b_rows = by_block(decays_before(blocks, LEVEL // 8))
    b_columns = by_block(suffix_decays(blocks, LEVEL // 8))
    dtype = b_q[0].dtype
    b_x = ()
    b_y = ()
    for i in tl.static_range(BLOCK):
        b_x = b_x + ((b_q[i] * b_row[i] * b_rows).to(dtype),)
        b_y = b_y + ((b_k[i] * b_column[i] * b_columns).to(dtype),)
    return add_pairs(b_A, join_tokens(b_x, BK), join_tokens(b_y, BK), LEVEL, BT, PRECISION)


@triton.jit(do_not_specialize=["scale", "T", "B", "H", "HV", "row0"])
def chunk_gla_fwd_kernel_intra(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    g,  # [B, T, HV, K]
    A,  # [B, T, HV, BT], written with STORE_A
    qg,  # [rows', HV, BT, K], written with STORE_DECAYED, as are the next two
    kg,  # [rows', HV, BT, K]
    decay,  # [rows', HV, K] fp32
    bounds,  # [N+1] int64 or None
    table,  # [rows, 2] int32 or None
    scale,
    T,
    B,
    H,
    HV,
    row0,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STORE_A: tl.constexpr,
    STORE_DECAYED: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (chunk row, value head); K is walked in slabs of BK."""
    tl.static_assert(BT == BLOCKS * BLOCK)
    i_r, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row0 + i_r, T, B, BT, IS_VARLEN)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    o_b = tl.arange(0, BLOCKS)
    m_t = o_t < b_len
    o_hv = (t0 + o_t) * HV + i_hv
    o_r = i_r.to(tl.int64) * HV + i_hv
    p_qk = (t0 * H + i_h) * K
    dtype = q.dtype.element_ty

    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    b_diagonal = tl.zeros([BT], dtype=tl.float32)
    # masks of pairs are cheaper than registers that hold them
    for i_k in tl.range(0, K, BK, disable_licm=True):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_q = load_tokens(q + p_qk, H * K, o_k, m_k, b_len)
        b_k = load_tokens(k + p_qk, H * K, o_k, m_k, b_len)
        b_decay = load_decays(g + (t0 * HV + i_hv) * K, HV * K, o_k, m_k, b_len)
        if STORE_A:
            o_tk = p_qk + o_t[:, None] * (H * K) + o_k[None, :]
            m_tk = m_t[:, None] & m_k[None, :]
            b_qt = tl.load(q + o_tk, mask=m_tk, other=0.0).to(tl.float32)
            b_kt = tl.load(k + o_tk, mask=m_tk, other=0.0).to(tl.float32)
            b_diagonal += tl.sum(b_qt * b_kt, 1)
            for i_l in tl.static_range(3):
                b_A = add_near_pairs(b_A, b_q, b_k, b_decay, 1 << i_l, BT, BK, PRECISION)
        b_row, b_column = prefix_decays(b_decay, 8), suffix_decays(b_decay, 8)
        blocks, b_all = block_decays(b_row[7])
        if STORE_A:
            for i_l in tl.static_range(3, 6):
                b_A = add_far_pairs(
                    b_A, b_q, b_k, b_row, b_column, blocks, 1 << i_l, BT, BK, PRECISION
                )
        if STORE_DECAYED:
            # stores last: a product waits for every store before it
            b_before = by_block(decays_before(blocks, 8)) * scale
            b_after = by_block(suffix_decays(blocks, 8))
            o_w = o_r * BT * K + (o_b * (BLOCK * K))[:, None] + o_k[None, :]
            for i in tl.static_range(BLOCK):
                b_qg = (b_q[i] * b_row[i] * b_before).to(dtype)
                b_kg = (b_k[i] * b_column[i] * b_after).to(dtype)
                tl.store(qg + o_w + i * K, b_qg, mask=m_k[None, :])
                tl.store(kg + o_w + i * K, b_kg, mask=m_k[None, :])
            tl.store(decay + o_r * K + o_k, b_all, mask=m_k)
    if STORE_A:
        b_A += tl.where(o_t[:, None] == o_t[None, :], b_diagonal[:, None], 0.0)
        p_A = o_hv[:, None] * BT + o_t[None, :]
        tl.store(A + p_A, (b_A * scale).to(dtype), mask=m_t[:, None])
