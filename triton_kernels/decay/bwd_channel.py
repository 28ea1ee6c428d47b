"""Gradients within one chunk of gla, given the states and their gradients (notation of intra.py).

S enters the chunk, dS is the gradient of the state that leaves it. With dA = scale do V^T, lower:

    dq_i = scale exp(G_i) S do_i + sum_j dA_ij k_j exp(G_i - G_j)
    dk_j = exp(G_last - G_j) dS v_j + sum_i dA_ij q_i exp(G_i - G_j)

Pairs of tokens of one block of 8 are summed one by one in fp32; those of different blocks are
products of decayed rows and columns, at the three upper levels of delta/pairs.py.

The gate of a token reaches every pair that straddles it: its gradient is the suffix sum over the
chunk of q dq - k dk, plus <exp(G_last) S, dS> + sum_j k_j dk_j of the leaving state. The terms of a
product are those of its rounded operands, so that pairs which lie wholly after a token cancel to
fp32 accuracy. What a token reads of its own write has no gate and stays out of the sum.
"""

import triton
import triton.language as tl

from ..delta.gates import LOG2_GATE_FLOOR, LOG2E
from ..delta.pairs import level_mask
from ..delta.rows import chunk_position
from .tokens import (
    BLOCK,
    BLOCKS,
    block_decays,
    decays_before,
    join_tokens,
    load_decays,
    load_tokens,
    over_blocks,
    prefix_decays,
    suffix_decays,
)


@triton.jit(do_not_specialize=["scale", "T", "B", "HV", "row0"])
def chunk_gla_bwd_kernel_pairs(
    v,  # [B, T, HV, V]
    do,  # [B, T, HV, V]
    dA,  # [rows', HV, BT, BT], written; 0 above the diagonal
    bounds,  # [N+1] int64 or None
    table,  # [rows, 2] int32 or None
    scale,
    T,
    B,
    HV,
    row0,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """scale do V^T, lower. One program per (chunk row, value head)."""
    i_r, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    t0, b_len = chunk_position(bounds, table, row0 + i_r, T, B, BT, IS_VARLEN)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    o_hv = (t0 + o_t) * HV + i_hv
    b_dA = tl.zeros([BT, BT], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        p_tv = o_hv[:, None] * V + o_v[None, :]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        b_do = tl.load(do + p_tv, mask=m_tv, other=0.0)
        b_v = tl.load(v + p_tv, mask=m_tv, other=0.0)
        b_dA = tl.dot(b_do, tl.trans(b_v), b_dA, input_precision=PRECISION)
    b_dA = tl.where(o_t[:, None] >= o_t[None, :], b_dA * scale, 0.0)
    p_dA = dA + ((i_r.to(tl.int64) * HV + i_hv) * BT + o_t[:, None]) * BT + o_t[None, :]
    tl.store(p_dA, b_dA.to(dA.dtype.element_ty))


@triton.jit
def state_operand(b_S, STATE_DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A state in the dtype of its products; one in fp32 to the nearest tf32, which the tensor cores
    would cut off instead, at twice the error."""
    b_S = b_S.to(STATE_DTYPE)
    if STATE_DTYPE == tl.float32 and PRECISION == "tf32":
        b_bits = b_S.to(tl.int32, bitcast=True) + (1 << 12)
        b_near = (b_bits & -(1 << 13)).to(tl.float32, bitcast=True)
        b_S = tl.where(b_S == b_S, b_near, b_S)
    return b_S


@triton.jit
def near_gradients(dA, b_q, b_k, b_decay, BT: tl.constexpr):
    """(dq, dk), tuples of tokens, of the pairs j < i within blocks, by Horner's scheme:

        dq_i = e_i (P_i,i-1 k_i-1 + e_i-1 (P_i,i-2 k_i-2 + ..)),  e the decays of tokens, P of dA,

    and dk_j the same from the last token backwards. dA: the chunk's [BT, BT].
    """
    p_dA = dA + tl.arange(0, BLOCKS)[:, None] * (BLOCK * BT + BLOCK)
    b_zero = tl.zeros(b_decay[0].shape, dtype=tl.float32)
    b_dq = ()
    b_dk = ()
    for _ in tl.static_range(BLOCK):
        b_dk = b_dk + (b_zero,)
    for i in tl.static_range(BLOCK - 1, -1, -1):
        b_row = b_zero
        b_columns = ()
        b_qi = b_q[i].to(tl.float32)
        for j in tl.static_range(BLOCK):
            b_column = b_dk[j]
            if j < i:
                b_P = tl.load(p_dA + (i * BT + j)).to(tl.float32)
                b_row = b_row * b_decay[j] + b_P * b_k[j].to(tl.float32)
                b_column = (b_column + b_P * b_qi) * b_decay[i]
            b_columns = b_columns + (b_column,)
        b_dk = b_columns
        b_dq = (b_row * b_decay[i],) + b_dq
    return b_dq, b_dk


@triton.jit
def far_gradients(
    dA, b_q, b_k, b_row, b_column, blocks, b_dq, b_dk, b_dG, LEVEL: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of the pairs of a level between blocks.

    b_row, b_column [BT, BK] decay rows and columns within their blocks; blocks: decays of blocks.
    """
    if LEVEL > 8:
        b_row *= over_blocks(decays_before(blocks, LEVEL // 8), BK)
        b_column *= over_blocks(suffix_decays(blocks, LEVEL // 8), BK)
    o_t = tl.arange(0, BT)
    b_x = (b_q * b_row).to(DTYPE)
    b_y = (b_k * b_column).to(DTYPE)
    p_dA = dA + o_t[:, None] * BT + o_t[None, :]
    b_P = tl.where(level_mask(LEVEL, BT), tl.load(p_dA), tl.zeros([1, 1], dtype=DTYPE))
    b_rows = tl.dot(b_P, b_y, input_precision=PRECISION)
    b_columns = tl.dot(tl.trans(b_P), b_x, input_precision=PRECISION)
    b_dq += b_row * b_rows
    b_dk += b_column * b_columns
    b_dG += b_x.to(tl.float32) * b_rows - b_y.to(tl.float32) * b_columns
    return b_dq, b_dk, b_dG


@triton.jit(do_not_specialize=["scale", "T", "B", "H", "HV", "row0"])
def chunk_gla_bwd_kernel_intra(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV, K]
    do,  # [B, T, HV, V] or None
    dA,  # [rows', HV, BT, BT] or None
    h,  # [rows', HV, K, V]
    dh,  # [rows', HV, K, V]
    dq,  # [B, T, HV, K], written
    dk,  # [B, T, HV, K], written
    dg,  # [B, T, HV, K], written
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
    HAS_DO: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """dq, dk, dg. One program per (chunk row, value head, slab of BK channels)."""
    tl.static_assert(BT == BLOCKS * BLOCK)
    NK: tl.constexpr = (K + BK - 1) // BK
    i_s = tl.program_id(0) % NK
    i_r = tl.program_id(0) // NK
    i_local, i_hv = i_r // HV, i_r % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row0 + i_local, T, B, BT, IS_VARLEN)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    o_k = i_s * BK + tl.arange(0, BK)
    m_t, m_k = o_t < b_len, o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    o_hv = (t0 + o_t) * HV + i_hv
    o_r = i_local.to(tl.int64) * HV + i_hv
    p_qk = (t0 * H + i_h) * K
    p_gk = o_hv[:, None] * K + o_k[None, :]
    p_dA = dA
    dtype = q.dtype.element_ty

    b_decay = load_decays(g + (t0 * HV + i_hv) * K, HV * K, o_k, m_k, b_len)
    b_row, b_column = prefix_decays(b_decay, 8), suffix_decays(b_decay, 8)
    blocks, b_all = block_decays(b_row[7])
    b_row, b_column = join_tokens(b_row, BK), join_tokens(b_column, BK)

    # through the states
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_dlast = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        p_tv = o_hv[:, None] * V + o_v[None, :]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        p_S = o_r * K * V + o_k[:, None] * V + o_v[None, :]
        m_S = m_k[:, None] & (o_v < V)[None, :]
        b_S = tl.load(h + p_S, mask=m_S, other=0.0)
        b_dS = tl.load(dh + p_S, mask=m_S, other=0.0)
        b_dlast += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 1)
        b_v = tl.load(v + p_tv, mask=m_tv, other=0.0).to(STATE_DTYPE)
        b_dS = tl.trans(state_operand(b_dS, STATE_DTYPE, PRECISION))
        b_dk = tl.dot(b_v, b_dS, b_dk, input_precision=PRECISION)
        if HAS_DO:
            b_do = tl.load(do + p_tv, mask=m_tv, other=0.0).to(STATE_DTYPE)
            b_S = tl.trans(state_operand(b_S, STATE_DTYPE, PRECISION))
            b_dq = tl.dot(b_do, b_S, b_dq, input_precision=PRECISION)

    b_qs = load_tokens(q + p_qk, H * K, o_k, m_k, b_len)
    b_ks = load_tokens(k + p_qk, H * K, o_k, m_k, b_len)
    b_q, b_k = join_tokens(b_qs, BK).to(tl.float32), join_tokens(b_ks, BK).to(tl.float32)
    b_dk *= b_column * over_blocks(suffix_decays(blocks, 8), BK)
    # what a token's gate does to the state that leaves: it decays the tokens before it
    b_written = b_k * b_dk
    b_leaving = (b_dlast * b_all)[None, :]
    if PRECISION == "tf32x3":
        m_before = (o_t[:, None] > o_t[None, :]).to(tl.float32)
        b_leaving += tl.dot(m_before, b_written, input_precision=PRECISION)
        b_dG = tl.zeros([BT, BK], dtype=tl.float32)
    else:
        # the total minus a suffix sum cancels to fp32, which is enough beside 16-bit products
        b_leaving += tl.sum(b_written, 0)[None, :]
        b_dG = -b_written
    if HAS_DO:
        b_dq *= b_row * over_blocks(decays_before(blocks, 8), BK) * scale
        b_dG += b_q * b_dq
        p_dA += o_r * (BT * BT)
        # through the pairs of the same block
        b_near_dq, b_near_dk = near_gradients(p_dA, b_qs, b_ks, b_decay, BT)
        b_near_dq, b_near_dk = join_tokens(b_near_dq, BK), join_tokens(b_near_dk, BK)
        b_dq += b_near_dq
        b_dk += b_near_dk
        b_dG += b_q * b_near_dq - b_k * b_near_dk
        b_d = tl.load(p_dA + o_t * (BT + 1)).to(tl.float32)[:, None]
        b_dq += b_d * b_k
        b_dk += b_d * b_q

        # through the pairs of different blocks
        for i_l in tl.static_range(3, 6):
            b_dq, b_dk, b_dG = far_gradients(
                p_dA, b_q, b_k, b_row, b_column, blocks, b_dq, b_dk, b_dG, 1 << i_l,
                BT, BK, PRECISION, dtype,
            )  # fmt: skip
    tl.store(dq + p_gk, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + p_gk, b_dk.to(dk.dtype.element_ty), mask=m_tk)

    # reverse scan, then every row gets what the leaving state adds
    b_dG = tl.cumsum(b_dG, 0, reverse=True) + b_leaving
    # at the floor the gate is constant
    b_g = tl.load(g + p_gk, mask=m_tk, other=0.0).to(tl.float32)
    b_dG = tl.where(b_g * LOG2E > LOG2_GATE_FLOOR, b_dG, 0.0)
    tl.store(dg + p_gk, b_dG.to(dg.dtype.element_ty), mask=m_tk)
