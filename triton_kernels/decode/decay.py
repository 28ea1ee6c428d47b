"""A few tokens of the decay families on a pool of states, in place.

    S <- Diag(exp(g_t)) S + k_t v_t^T;  o_t = scale S^T q_t

As decode/delta.py has it, with a [BK, BV] tile of one head's state a program. No token needs what
another tile of the state holds, so K is split over programs where it is large; the outputs then
come in parts.
"""

import triton
import triton.language as tl

from ..decay.recurrent import decay_rows
from ..delta.recurrent import state_offsets
from .slots import (
    is_outside,
    read_slot,
    rounded,
    row_pointer,
    slot_pointer,
    store_state,
    token_range,
)


@triton.jit
def store_written(
    k_out, u_out, g_out, i_row, b_k, b_v, b_g, i_k, i_v, i_hv, o_k, o_v, H, HV,
    K: tl.constexpr, V: tl.constexpr, USE_G: tl.constexpr, USE_GK: tl.constexpr,
):  # fmt: skip
    """What a token of flat row i_row (int64) writes: k [BK], v [BV] and the natural-log gates,
    fp32.

    The first tile of the other axis stores each; k comes with the first value head of its group.
    """
    group = HV // H
    m_k = (o_k < K) & (i_v == 0)
    p_k = k_out + (i_row * H + i_hv // group) * K + o_k
    tl.store(p_k, b_k, mask=m_k & (i_hv % group == 0))
    tl.store(u_out + (i_row * HV + i_hv) * V + o_v, b_v, mask=(o_v < V) & (i_k == 0))
    if USE_GK:
        tl.store(g_out + (i_row * HV + i_hv) * K + o_k, b_g, mask=m_k)
    elif USE_G:
        tl.store(g_out + i_row * HV + i_hv, b_g, mask=(i_v == 0) & (i_k == 0))


@triton.jit(do_not_specialize=[
    "scale", "T", "N", "tokens", "H", "HV", "slots", "S", "has_accepted",
    "slot_stride", "read_stride", "write_stride", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h",
    "v_b", "v_t", "v_h", "g_b", "g_t", "g_h",
])  # fmt: skip
def decode_decay_kernel_step(
    q,  # [B, T, H, K], strides q_b, q_t, q_h, 1
    k,  # [B, T, H, K], the same
    v,  # [B, T, HV, V], the same
    g,  # [B, T, HV] with USE_G, [B, T, HV, K] with USE_GK, strides g_b, g_t, g_h (, 1), else None
    g_gamma,  # [HV] or None
    state,  # [slots, HV, K, V], or [slots, HV, V, K] if STATE_V_FIRST; slots slot_stride apart
    state_indices,  # [N] or [N, S] int32, rows read_stride apart
    write_indices,  # the same, rows write_stride apart; may be state_indices itself
    has_initial_state,  # [N] bool, or None
    num_accepted,  # [N] int32 if has_accepted, else any int32
    cu_seqlens,  # [N+1] int32 or int64 if IS_VARLEN (then B = 1), else None
    o,  # [NK, B, T, HV, V]: a part for each tile of K
    k_out,  # [B, T, H, K] fp32 if VERIFY, else None
    u_out,  # [B, T, HV, V] fp32 if VERIFY, else None
    g_out,  # [B, T, HV] or [B, T, HV, K] fp32 if VERIFY and with gates, else None
    scale,
    T,
    N,
    tokens,  # B * T
    H,
    HV,
    slots,
    S,  # slots of a row, one per token; 0: one slot for all tokens
    has_accepted,
    slot_stride,
    read_stride,
    write_stride,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLOTS_ALIGNED: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    USE_GK: tl.constexpr,
    INITIAL_MASK: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    VERIFY: tl.constexpr,  # leaves the pool alone
):  # fmt: skip
    """One program per (row, value head, tile of the state)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_k, i_v = tl.program_id(0) // NV % NK, tl.program_id(0) % NV
    i_nh = tl.program_id(0) // (NK * NV)
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    slot = read_slot(state_indices, num_accepted, i_n, read_stride, S, has_accepted)
    i_b, bos, n_tok = token_range(cu_seqlens, i_n, T, IS_VARLEN)

    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    # nothing here waits for the slot
    p_q = row_pointer(q, i_b, bos, i_h, q_b, q_t, q_h, ROWS_ALIGNED) + o_k
    p_k = row_pointer(k, i_b, bos, i_h, k_b, k_t, k_h, ROWS_ALIGNED) + o_k
    p_v = row_pointer(v, i_b, bos, i_hv, v_b, v_t, v_h, ROWS_ALIGNED) + o_v
    more = n_tok > 0
    b_q = tl.load(p_q, mask=m_k & more, other=0.0)
    b_k = tl.load(p_k, mask=m_k & more, other=0.0)
    b_v = tl.load(p_v, mask=m_v & more, other=0.0)
    b_g, b_gamma = 0.0, 0.0
    if USE_GK:
        p_g = row_pointer(g, i_b, bos, i_hv, g_b, g_t, g_h, ROWS_ALIGNED) + o_k
        b_g = tl.load(p_g, mask=m_k & more, other=0.0)
    elif USE_G:
        p_g = row_pointer(g, i_b, bos, i_hv, g_b, g_t, g_h, False)
        b_g = tl.load(p_g, mask=more, other=0.0)
    if USE_G_GAMMA:
        b_gamma = tl.load(g_gamma + i_hv).to(tl.float32)

    live = (slot >= 0) & (slot < slots)
    n_run = tl.where(live, n_tok, 0)
    n_run = tl.where(S > 0, tl.minimum(n_run, S), n_run)
    o_s = state_offsets(0, o_k, o_v, K, V, STATE_V_FIRST)
    o_head = i_hv.to(tl.int64) * (K * V)
    m_s = m_k[:, None] & m_v[None, :]
    m_read = m_s & live
    if INITIAL_MASK:
        m_read = m_read & (tl.load(has_initial_state + i_n) != 0)
    p_slot = slot_pointer(state, slot, slot_stride, SLOTS_ALIGNED) + o_head
    b_s = tl.load(p_slot + o_s, mask=m_read, other=0.0).to(tl.float32)

    i_row = i_b * T + bos
    o_part = i_k.to(tl.int64) * tokens
    p_o = o + ((o_part + i_row) * HV + i_hv) * V + o_v
    p_write = write_indices + i_n.to(tl.int64) * write_stride
    for t in range(0, n_run):
        more = t + 1 < n_run
        t_next = bos + t + 1
        p_q = row_pointer(q, i_b, t_next, i_h, q_b, q_t, q_h, ROWS_ALIGNED) + o_k
        p_k = row_pointer(k, i_b, t_next, i_h, k_b, k_t, k_h, ROWS_ALIGNED) + o_k
        p_v = row_pointer(v, i_b, t_next, i_hv, v_b, v_t, v_h, ROWS_ALIGNED) + o_v
        n_q = tl.load(p_q, mask=m_k & more, other=0.0)
        n_k = tl.load(p_k, mask=m_k & more, other=0.0)
        n_v = tl.load(p_v, mask=m_v & more, other=0.0)
        n_g = b_g
        if USE_GK:
            p_g = row_pointer(g, i_b, t_next, i_hv, g_b, g_t, g_h, ROWS_ALIGNED) + o_k
            n_g = tl.load(p_g, mask=m_k & more, other=0.0)
        elif USE_G:
            p_g = row_pointer(g, i_b, t_next, i_hv, g_b, g_t, g_h, False)
            n_g = tl.load(p_g, mask=more, other=0.0)

        b_q, b_k, b_v = b_q.to(tl.float32) * scale, b_k.to(tl.float32), b_v.to(tl.float32)
        b_row, _ = decay_rows(b_g, b_gamma, 0.0, USE_G, USE_G_GAMMA, USE_GK, False)
        if USE_G or USE_G_GAMMA or USE_GK:
            b_s *= b_row
        b_s = tl.fma(b_k[:, None], b_v[None, :], b_s)
        # read after the write
        b_o = tl.sum(b_s * b_q[:, None], 0)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
        p_o += HV * V
        if VERIFY:
            b_log = b_gamma
            if USE_G or USE_GK:
                b_log = b_g.to(tl.float32) + b_gamma
            store_written(
                k_out, u_out, g_out, i_row + t, b_k, b_v, b_log, i_k, i_v, i_hv, o_k, o_v, H, HV,
                K, V, USE_G or USE_G_GAMMA, USE_GK,
            )  # fmt: skip
        b_s = rounded(b_s, state)
        if not VERIFY:
            if S > 0:
                store_state(
                    state, p_write + t, b_s, o_s, m_s, o_head, slots, slot_stride, SLOTS_ALIGNED
                )
        b_q, b_k, b_v, b_g = n_q, n_k, n_v, n_g
    if not VERIFY:
        if (S == 0) & live:
            store_state(state, p_write, b_s, o_s, m_s, o_head, slots, slot_stride, SLOTS_ALIGNED)

    # tokens without a slot, and rows of no sequence
    b_zero_k, b_zero_v = tl.zeros([BK], dtype=tl.float32), tl.zeros([BV], dtype=tl.float32)
    b_zero_g = 0.0
    if USE_GK:
        b_zero_g = b_zero_k
    for t in range(n_run, n_tok):
        tl.store(p_o, b_zero_v.to(o.dtype.element_ty), mask=m_v)
        p_o += HV * V
        if VERIFY:
            store_written(
                k_out, u_out, g_out, i_row + t, b_zero_k, b_zero_v, b_zero_g, i_k, i_v, i_hv,
                o_k, o_v, H, HV, K, V, USE_G or USE_G_GAMMA, USE_GK,
            )  # fmt: skip
    if IS_VARLEN:
        for t in range(i_n, T, N):
            if is_outside(cu_seqlens, t, N):
                i_row = i_b + t
                p_o = o + ((o_part + i_row) * HV + i_hv) * V + o_v
                tl.store(p_o, b_zero_v.to(o.dtype.element_ty), mask=m_v)
                if VERIFY:
                    store_written(
                        k_out, u_out, g_out, i_row, b_zero_k, b_zero_v, b_zero_g, i_k, i_v, i_hv,
                        o_k, o_v, H, HV, K, V, USE_G or USE_G_GAMMA, USE_GK,
                    )  # fmt: skip
