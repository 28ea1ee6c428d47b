"""Accepted tokens of a verify call into the pool: S <- Diag(exp(g_t)) S + k_t u_t^T, rounded to the
pool's dtype after every token as the steps do it.

k, u and g are what verify returned. No token needs what another tile of the state holds.
"""

import triton
import triton.language as tl

from ..delta.gates import log2_gate
from ..delta.recurrent import decay_state, gate_index, load_gates, state_offsets
from .slots import rounded, slot_pointer, store_state, token_range


@triton.jit(do_not_specialize=["T", "H", "HV", "slots", "slot_stride", "index_stride"])
def decode_kernel_commit(
    k,  # [B, T, H, K] fp32
    u,  # [B, T, HV, V] fp32
    g,  # [B, T, HV, GATES] fp32: natural-log gates, or None without
    state,  # [slots, HV, K, V], or [slots, HV, V, K] if STATE_V_FIRST; slots slot_stride apart
    state_indices,  # [N] int32, index_stride apart
    has_initial_state,  # [N] bool, or None
    num_accepted,  # [N] int32
    cu_seqlens,  # [N+1] int32 or int64 if IS_VARLEN (then B = 1), else None
    T,
    H,
    HV,
    slots,
    slot_stride,
    index_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLOTS_ALIGNED: tl.constexpr,
    INITIAL_MASK: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """One program per (row, value head, tile of the state)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_k, i_v = tl.program_id(0) // NV % NK, tl.program_id(0) % NV
    i_nh = tl.program_id(0) // (NK * NV)
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    p_index = state_indices + i_n.to(tl.int64) * index_stride
    slot = tl.load(p_index)
    n_run = tl.load(num_accepted + i_n)
    i_b, bos, n_tok = token_range(cu_seqlens, i_n, T, IS_VARLEN)
    n_run = tl.minimum(n_run, n_tok)
    m_known = True
    if INITIAL_MASK:
        m_known = tl.load(has_initial_state + i_n) != 0
    # a state that nothing is added to is there already, unless it has to become zero
    m_same = (n_run <= 0) & m_known
    if (slot < 0) | (slot >= slots) | m_same:
        return

    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_g = gate_index(o_k, GATES)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = state_offsets(0, o_k, o_v, K, V, STATE_V_FIRST)
    o_head = i_hv.to(tl.int64) * (K * V)
    p_s = slot_pointer(state, slot, slot_stride, SLOTS_ALIGNED) + o_head + o_s
    b_s = tl.load(p_s, mask=m_s & m_known, other=0.0).to(tl.float32)

    i_row = i_b * T + bos
    p_k = k + (i_row * H + i_h) * K + o_k
    p_u = u + (i_row * HV + i_hv) * V + o_v
    p_g = o_g
    if GATES > 0:
        p_g = g + (i_row * HV + i_hv) * GATES + o_g
    for _ in range(0, n_run):
        b_k = tl.load(p_k, mask=m_k, other=0.0)
        b_u = tl.load(p_u, mask=m_v, other=0.0)
        b_s = decay_state(b_s, log2_gate(load_gates(p_g, m_k, GATES)), GATES)
        b_s = rounded(tl.fma(b_k[:, None], b_u[None, :], b_s), state)
        p_k += H * K
        p_u += HV * V
        p_g += HV * GATES
    store_state(state, p_index, b_s, o_s, m_s, o_head, slots, slot_stride, SLOTS_ALIGNED)
