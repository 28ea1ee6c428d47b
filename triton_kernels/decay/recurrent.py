"""Token-serial decay families, forward. A program owns a [BK, BV] tile of one head's state in fp32
registers.

    S <- Diag(exp(g_t)) S Diag(exp(gv_t)) + k_t v_t^T;  o_t = scale S^T q_t

The gate is a scalar of the head (g, g_gamma or their sum) or one per key channel. No token needs
what another tile of the state holds, so K is split over programs where it is large; the outputs
then come in parts. Decode is T = 1. The inputs of the next token are loaded while the current one
is computed.
"""

import triton
import triton.language as tl

from ..delta.gates import log2_gate
from ..delta.recurrent import sequence_range, state_offsets


@triton.jit
def tile_position(
    bounds, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """(tile of K, tile of V, sequence and head, head, first token, end) of a program."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_tile = tl.program_id(0) % (NK * NV)
    i_nh = (tl.program_id(0) // (NK * NV)).to(tl.int64)
    bos, eos = sequence_range(bounds, i_nh // HV, T, IS_VARLEN)
    return i_tile // NV, i_tile % NV, i_nh, i_nh % HV, bos, eos


@triton.jit
def decay_rows(
    b_g, b_gamma, b_gv,
    USE_G: tl.constexpr, USE_G_GAMMA: tl.constexpr, USE_GK: tl.constexpr, USE_GV: tl.constexpr,
):  # fmt: skip
    """(exp(g) as a scalar or [BK, 1], exp(gv) [1, BV]) from the gates as loaded; 1 where absent.
    """
    b_row, b_column = 1.0, 1.0
    if USE_GK:
        b_row = tl.exp2(log2_gate(b_g.to(tl.float32)))[:, None]
    elif USE_G and USE_G_GAMMA:
        b_row = tl.exp2(log2_gate(b_g.to(tl.float32) + b_gamma))
    elif USE_G:
        b_row = tl.exp2(log2_gate(b_g.to(tl.float32)))
    elif USE_G_GAMMA:
        b_row = tl.exp2(log2_gate(b_gamma))
    if USE_GV:
        b_column = tl.exp2(log2_gate(b_gv.to(tl.float32)))[None, :]
    return b_row, b_column


@triton.jit(do_not_specialize=["scale", "T", "tokens"])
def fused_recurrent_decay_fwd_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV] with USE_G, [B, T, HV, K] with USE_GK, else None
    g_gamma,  # [HV] or None
    gv,  # [B, T, HV, V] or None
    initial_state,  # [N, HV, K, V], or [N, HV, V, K] if STATE_V_FIRST, or None
    bounds,  # [N+1] int64 if IS_VARLEN (then B = 1), else None
    o,  # [NK, B, T, HV, V]: a part for each tile of K
    final_state,  # as initial_state, fp32, or None
    scale,
    T,
    tokens,  # B * T
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    USE_GK: tl.constexpr,
    USE_GV: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """One program per (sequence, value head, tile of the state)."""
    i_k, i_v, i_nh, i_hv, bos, eos = tile_position(bounds, T, HV, K, V, BK, BV, IS_VARLEN)
    i_h = i_hv // (HV // H)
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = state_offsets(i_nh, o_k, o_v, K, V, STATE_V_FIRST)
    if HAS_INITIAL_STATE:
        b_s = tl.load(initial_state + o_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_s = tl.zeros([BK, BV], dtype=tl.float32)

    o_o = (bos * HV + i_hv) * V + o_v
    p_q = q + (bos * H + i_h) * K + o_k
    p_k = k + (bos * H + i_h) * K + o_k
    p_v = v + o_o
    p_o = o + i_k.to(tl.int64) * tokens * (HV * V) + o_o
    more = bos < eos
    b_q = tl.load(p_q, mask=m_k & more, other=0.0)
    b_k = tl.load(p_k, mask=m_k & more, other=0.0)
    b_v = tl.load(p_v, mask=m_v & more, other=0.0)
    b_g, b_gv, b_gamma = 0.0, 0.0, 0.0
    if USE_GK:
        p_g = g + (bos * HV + i_hv) * K + o_k
        b_g = tl.load(p_g, mask=m_k & more, other=0.0)
    elif USE_G:
        p_g = g + bos * HV + i_hv
        b_g = tl.load(p_g, mask=more, other=0.0)
    if USE_G_GAMMA:
        b_gamma = tl.load(g_gamma + i_hv).to(tl.float32)
    if USE_GV:
        p_gv = gv + o_o
        b_gv = tl.load(p_gv, mask=m_v & more, other=0.0)
    for t in range(bos, eos):
        more = t + 1 < eos
        p_q += H * K
        p_k += H * K
        p_v += HV * V
        n_q = tl.load(p_q, mask=m_k & more, other=0.0)
        n_k = tl.load(p_k, mask=m_k & more, other=0.0)
        n_v = tl.load(p_v, mask=m_v & more, other=0.0)
        n_g, n_gv = b_g, b_gv
        if USE_GK:
            p_g += HV * K
            n_g = tl.load(p_g, mask=m_k & more, other=0.0)
        elif USE_G:
            p_g += HV
            n_g = tl.load(p_g, mask=more, other=0.0)
        if USE_GV:
            p_gv += HV * V
            n_gv = tl.load(p_gv, mask=m_v & more, other=0.0)

        b_row, b_column = decay_rows(b_g, b_gamma, b_gv, USE_G, USE_G_GAMMA, USE_GK, USE_GV)
        if USE_G or USE_G_GAMMA or USE_GK:
            b_s *= b_row
        if USE_GV:
            b_s *= b_column
        b_s += b_k.to(tl.float32)[:, None] * b_v.to(tl.float32)[None, :]
        # read after the write
        b_o = tl.sum(b_s * (b_q.to(tl.float32) * scale)[:, None], 0)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
        p_o += HV * V
        b_q, b_k, b_v, b_g, b_gv = n_q, n_k, n_v, n_g, n_gv
    if STORE_FINAL_STATE:
        tl.store(final_state + o_s, b_s, mask=m_s)
