"""A few tokens of the delta families on a pool of states, in place.

    S' = Diag(exp(g_t)) S;  u_t = beta_t (v_t - S'^T k_t);  S = S' + k_t u_t^T;  o_t = scale S^T q_t

One program owns a [K, BV] tile of one head's state in fp32 registers, from the slot it comes from
to the slots it goes to. o_t is read from the fp32 state, which is then rounded to the pool's dtype:
one call of several tokens equals as many calls. Nothing is compiled for a number of tokens, so both
run the same machine code. The inputs of the next token are loaded while the current one is
computed.

GATES is the number of gates of a token and head: K, 1 or 0, as in delta/recurrent.py.
"""

import triton
import triton.language as tl

from ..delta.gates import beta_fwd, log2_gate
from ..delta.recurrent import (
    delta_token,
    gate_index,
    gate_parameters,
    key_row,
    load_gates,
    log_gate_of,
    state_offsets,
)
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
    k_out, u_out, g_out, i_row, b_k, b_u, b_g, i_v, i_hv, o_k, o_v, o_g, H, HV,
    K: tl.constexpr, V: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """What a token of flat row i_row (int64) writes: k [K], u [BV] and the natural-log gates, fp32.

    The first V tile stores what is shared, k with the first value head of its group.
    """
    group = HV // H
    m_k = (o_k < K) & (i_v == 0) & (i_hv % group == 0)
    tl.store(k_out + (i_row * H + i_hv // group) * K + o_k, b_k, mask=m_k)
    tl.store(u_out + (i_row * HV + i_hv) * V + o_v, b_u, mask=o_v < V)
    if GATES > 0:
        # one gate of a head is in every place of b_g
        m_g = (o_k < GATES) & (i_v == 0)
        tl.store(g_out + (i_row * HV + i_hv) * GATES + o_g, b_g, mask=m_g)


@triton.jit(do_not_specialize=[
    "scale", "lower_bound", "T", "N", "H", "HV", "slots", "S", "has_accepted",
    "slot_stride", "read_stride", "write_stride", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h",
    "v_b", "v_t", "v_h", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h",
])  # fmt: skip
def decode_delta_kernel_step(
    q,  # [B, T, H, K], strides q_b, q_t, q_h, 1
    k,  # [B, T, H, K], the same
    v,  # [B, T, HV, V], the same
    g,  # [B, T, HV, GATES], the same, or None without gates
    beta,  # [B, T, HV], strides beta_b, beta_t, beta_h
    A_log,  # [HV] or None
    dt_bias,  # [HV, GATES] or None
    state,  # [slots, HV, K, V], or [slots, HV, V, K] if STATE_V_FIRST; slots slot_stride apart
    state_indices,  # [N] or [N, S] int32, rows read_stride apart
    write_indices,  # the same, rows write_stride apart; may be state_indices itself
    has_initial_state,  # [N] bool, or None
    num_accepted,  # [N] int32 if has_accepted, else any int32
    cu_seqlens,  # [N+1] int32 or int64 if IS_VARLEN (then B = 1), else None
    o,  # [B, T, HV, V]
    k_out,  # [B, T, H, K] fp32 if VERIFY, else None
    u_out,  # [B, T, HV, V] fp32 if VERIFY, else None
    g_out,  # [B, T, HV, GATES] fp32 if VERIFY and with gates, else None
    scale,
    lower_bound,
    T,
    N,
    H,
    HV,
    slots,
    S,  # slots of a row, one per token; 0: one slot for all tokens
    has_accepted,
    slot_stride,
    read_stride,
    write_stride,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    K: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLOTS_ALIGNED: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    USE_GATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    INITIAL_MASK: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    VERIFY: tl.constexpr,  # leaves the pool alone
):  # fmt: skip
    """One program per (row, value head, V tile)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_hv, i_n = tl.program_id(0) // NV % HV, tl.program_id(0) // NV // HV
    i_h = i_hv // (HV // H)
    slot = read_slot(state_indices, num_accepted, i_n, read_stride, S, has_accepted)
    i_b, bos, n_tok = token_range(cu_seqlens, i_n, T, IS_VARLEN)

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_g = gate_index(o_k, GATES)
    m_k, m_v = o_k < K, o_v < V
    # nothing here waits for the slot
    p_q = row_pointer(q, i_b, bos, i_h, q_b, q_t, q_h, ROWS_ALIGNED) + o_k
    p_k = row_pointer(k, i_b, bos, i_h, k_b, k_t, k_h, ROWS_ALIGNED) + o_k
    p_v = row_pointer(v, i_b, bos, i_hv, v_b, v_t, v_h, ROWS_ALIGNED) + o_v
    if GATES > 0:
        p_g = row_pointer(g, i_b, bos, i_hv, g_b, g_t, g_h, ROWS_ALIGNED and GATES > 1) + o_g
    else:
        p_g = o_g
    p_beta = row_pointer(beta, i_b, bos, i_hv, beta_b, beta_t, beta_h, False)
    more = n_tok > 0
    b_q = tl.load(p_q, mask=m_k & more, other=0.0)
    b_k = tl.load(p_k, mask=m_k & more, other=0.0)
    b_g = load_gates(p_g, m_k & more, GATES)
    b_v = tl.load(p_v, mask=m_v & more, other=0.0)
    b_beta = tl.load(p_beta, mask=more, other=0.0)
    b_a_log, b_bias = gate_parameters(A_log, dt_bias, i_hv, o_g, m_k, GATES, HAS_A_LOG, HAS_BIAS)

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
    p_o = o + (i_row * HV + i_hv) * V + o_v
    p_write = write_indices + i_n.to(tl.int64) * write_stride
    for t in range(0, n_run):
        more = t + 1 < n_run
        t_next = bos + t + 1
        p_q = row_pointer(q, i_b, t_next, i_h, q_b, q_t, q_h, ROWS_ALIGNED) + o_k
        p_k = row_pointer(k, i_b, t_next, i_h, k_b, k_t, k_h, ROWS_ALIGNED) + o_k
        p_v = row_pointer(v, i_b, t_next, i_hv, v_b, v_t, v_h, ROWS_ALIGNED) + o_v
        if GATES > 0:
            p_g = row_pointer(g, i_b, t_next, i_hv, g_b, g_t, g_h, ROWS_ALIGNED and GATES > 1) + o_g
        p_beta = row_pointer(beta, i_b, t_next, i_hv, beta_b, beta_t, beta_h, False)
        n_q = tl.load(p_q, mask=m_k & more, other=0.0)
        n_k = tl.load(p_k, mask=m_k & more, other=0.0)
        n_g = load_gates(p_g, m_k & more, GATES)
        n_v = tl.load(p_v, mask=m_v & more, other=0.0)
        n_beta = tl.load(p_beta, mask=more, other=0.0)

        b_q = key_row(b_q, USE_L2NORM) * scale
        b_k = key_row(b_k, USE_L2NORM)
        b_g = log_gate_of(b_g, b_a_log, b_bias, lower_bound, USE_GATE, BOUNDED)
        b_beta = beta_fwd(b_beta.to(tl.float32), USE_BETA_SIGMOID, NEG_EIGVAL)
        b_s, b_u, b_o = delta_token(
            b_s, b_q, b_k, b_v.to(tl.float32), log2_gate(b_g), b_beta, GATES
        )
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
        p_o += HV * V
        if VERIFY:
            store_written(
                k_out, u_out, g_out, i_row + t, b_k, b_u, b_g, i_v, i_hv, o_k, o_v, o_g, H, HV,
                K, V, GATES,
            )  # fmt: skip
        b_s = rounded(b_s, state)
        if not VERIFY:
            if S > 0:
                store_state(
                    state, p_write + t, b_s, o_s, m_s, o_head, slots, slot_stride, SLOTS_ALIGNED
                )
        b_q, b_k, b_g, b_v, b_beta = n_q, n_k, n_g, n_v, n_beta
    if not VERIFY:
        if (S == 0) & live:
            store_state(state, p_write, b_s, o_s, m_s, o_head, slots, slot_stride, SLOTS_ALIGNED)

    # tokens without a slot, and rows of no sequence
    b_zero_k, b_zero_v = tl.zeros([BK], dtype=tl.float32), tl.zeros([BV], dtype=tl.float32)
    for t in range(n_run, n_tok):
        tl.store(p_o, b_zero_v.to(o.dtype.element_ty), mask=m_v)
        p_o += HV * V
        if VERIFY:
            store_written(
                k_out, u_out, g_out, i_row + t, b_zero_k, b_zero_v, b_zero_k, i_v, i_hv,
                o_k, o_v, o_g, H, HV, K, V, GATES,
            )  # fmt: skip
    if IS_VARLEN:
        for t in range(i_n, T, N):
            if is_outside(cu_seqlens, t, N):
                i_row = i_b + t
                p_o = o + (i_row * HV + i_hv) * V + o_v
                tl.store(p_o, b_zero_v.to(o.dtype.element_ty), mask=m_v)
                if VERIFY:
                    store_written(
                        k_out, u_out, g_out, i_row, b_zero_k, b_zero_v, b_zero_k, i_v, i_hv,
                        o_k, o_v, o_g, H, HV, K, V, GATES,
                    )  # fmt: skip
