"""Token-serial delta rule, forward. One program owns a [K, BV] tile of one head's state in fp32
registers.

    S' = Diag(exp(g_t)) S;  u_t = beta_t (v_t - S'^T k_t);  S = S' + k_t u_t^T;  o_t = scale S^T q_t

The output is read before the write, as S'^T q + (k . q) u: both reductions start from S' and the
chain from token to token has one of them. Decode is T = 1. The inputs of the next token are loaded
while the current one is computed.

GATES is the number of gates of a token and head: K (KDA), 1 (gated_delta_rule) or 0 (delta_rule).
One gate is read by every channel: what follows is the same.
"""

import triton
import triton.language as tl

from .gates import beta_fwd, gate_fwd, l2norm_fwd, log2_gate


@triton.jit
def sequence_range(bounds, i_n, T, IS_VARLEN: tl.constexpr):
    """First token and end of sequence i_n in the flat token axis, int64."""
    if IS_VARLEN:
        bos = tl.load(bounds + i_n)
        eos = tl.load(bounds + i_n + 1)
    else:
        bos = i_n * T
        eos = bos + T
    return bos, eos


@triton.jit
def state_offsets(i_nh, o_k, o_v, K: tl.constexpr, V: tl.constexpr, STATE_V_FIRST: tl.constexpr):
    """Offsets of a [BK, BV] tile of state i_nh (int64) in memory [.., K, V] or [.., V, K]."""
    if STATE_V_FIRST:
        return i_nh * (K * V) + (o_v[None, :] * K + o_k[:, None])
    else:
        return i_nh * (K * V) + (o_k[:, None] * V + o_v[None, :])


@triton.jit
def gate_index(o_k, GATES: tl.constexpr):
    """Which of a token's gates each channel has."""
    if GATES == 1:
        return o_k * 0
    else:
        return o_k


@triton.jit
def gate_pointers(g, i_row, o_g, GATES: tl.constexpr):
    """Pointers [BK] to the gates of a token and head i_row (int64); of no use without gates."""
    if GATES == 0:
        return o_g
    else:
        return g + (i_row * GATES + o_g)


@triton.jit
def load_gates(p_g, m_k, GATES: tl.constexpr):
    """Gate arguments as stored; zeros without gates."""
    if GATES == 0:
        return tl.zeros(p_g.shape, dtype=tl.float32)
    else:
        return tl.load(p_g, mask=m_k, other=0.0)


@triton.jit
def decay_state(b_s, b_g, GATES: tl.constexpr):
    """The state [BK, BV] after its decay by base-2 log gates b_g [BK]."""
    if GATES == 0:
        return b_s
    else:
        return b_s * tl.exp2(b_g)[:, None]


@triton.jit
def log_gate_of(x, b_a_log, b_bias, lower_bound, USE_GATE: tl.constexpr, BOUNDED: tl.constexpr):
    """Natural-log gate from the gate argument as loaded."""
    b_g = x.to(tl.float32)
    if USE_GATE:
        b_g = gate_fwd(b_g, b_a_log, b_bias, lower_bound, BOUNDED)
    return b_g


@triton.jit
def log2_gate_of(x, b_a_log, b_bias, lower_bound, USE_GATE: tl.constexpr, BOUNDED: tl.constexpr):
    """Floored base-2 log gate from the gate argument as loaded."""
    return log2_gate(log_gate_of(x, b_a_log, b_bias, lower_bound, USE_GATE, BOUNDED))


@triton.jit
def gate_parameters(
    A_log, dt_bias, i_hv, o_g, m_k,
    GATES: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A_log of the head, and its dt_bias row [BK], fp32; zeros where absent."""
    b_a_log = 0.0
    if HAS_A_LOG:
        b_a_log = tl.load(A_log + i_hv).to(tl.float32)
    b_bias = tl.zeros(o_g.shape, dtype=tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(dt_bias + i_hv * GATES + o_g, mask=m_k, other=0.0).to(tl.float32)
    return b_a_log, b_bias


@triton.jit
def key_row(x, USE_L2NORM: tl.constexpr):
    """Row of q or k in fp32, normalised if asked."""
    b_x = x.to(tl.float32)
    if USE_L2NORM:
        b_x = l2norm_fwd(b_x, 0)
    return b_x


@triton.jit
def delta_token(b_s, b_q, b_k, b_v, b_g, b_beta, GATES: tl.constexpr):
    """(S, u, o) of a token, from the state before it, scaled q and the base-2 log gates; fp32."""
    b_s = decay_state(b_s, b_g, GATES)
    b_u = b_v - tl.sum(b_s * b_k[:, None], 0)
    b_u *= b_beta
    b_o = tl.sum(b_s * b_q[:, None], 0) + tl.sum(b_q * b_k, 0) * b_u
    return tl.fma(b_k[:, None], b_u[None, :], b_s), b_u, b_o


@triton.jit(do_not_specialize=["scale", "lower_bound", "T"])
def fused_recurrent_delta_fwd_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV, GATES], or None without gates
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, GATES] or None
    initial_state,  # [N, HV, K, V], or [N, HV, V, K] if STATE_V_FIRST, or None
    bounds,  # [N+1] int64 if IS_VARLEN (then B = 1), else None
    o,  # [B, T, HV, V]
    u,  # [B, T, HV, V] fp32, or None
    final_state,  # as initial_state, fp32, or None
    scale,
    lower_bound,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    USE_GATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
    STORE_U: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_nh = (tl.program_id(0) // NV).to(tl.int64)
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    bos, eos = sequence_range(bounds, i_n, T, IS_VARLEN)

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = state_offsets(i_nh, o_k, o_v, K, V, STATE_V_FIRST)
    if HAS_INITIAL_STATE:
        b_s = tl.load(initial_state + o_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_s = tl.zeros([BK, BV], dtype=tl.float32)
    o_g = gate_index(o_k, GATES)
    b_a_log, b_bias = gate_parameters(A_log, dt_bias, i_hv, o_g, m_k, GATES, HAS_A_LOG, HAS_BIAS)

    o_q = (bos * H + i_h) * K + o_k
    o_o = (bos * HV + i_hv) * V + o_v
    p_q, p_k = q + o_q, k + o_q
    p_g = gate_pointers(g, bos * HV + i_hv, o_g, GATES)
    p_v, p_beta = v + o_o, beta + bos * HV + i_hv
    p_o = o + o_o
    more = bos < eos
    b_q = tl.load(p_q, mask=m_k & more, other=0.0)
    b_k = tl.load(p_k, mask=m_k & more, other=0.0)
    b_g = load_gates(p_g, m_k & more, GATES)
    b_v = tl.load(p_v, mask=m_v & more, other=0.0)
    b_beta = tl.load(p_beta, mask=more, other=0.0)
    for t in range(bos, eos):
        more = t + 1 < eos
        p_q += H * K
        p_k += H * K
        p_g += HV * GATES
        p_v += HV * V
        p_beta += HV
        n_q = tl.load(p_q, mask=m_k & more, other=0.0)
        n_k = tl.load(p_k, mask=m_k & more, other=0.0)
        n_g = load_gates(p_g, m_k & more, GATES)
        n_v = tl.load(p_v, mask=m_v & more, other=0.0)
        n_beta = tl.load(p_beta, mask=more, other=0.0)

        b_q = key_row(b_q, USE_L2NORM) * scale
        b_k = key_row(b_k, USE_L2NORM)
        b_g = log2_gate_of(b_g, b_a_log, b_bias, lower_bound, USE_GATE, BOUNDED)
        b_beta = beta_fwd(b_beta.to(tl.float32), USE_BETA_SIGMOID, NEG_EIGVAL)
        b_s, b_u, b_o = delta_token(b_s, b_q, b_k, b_v.to(tl.float32), b_g, b_beta, GATES)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
        p_o += HV * V
        if STORE_U:
            tl.store(u + (t * HV + i_hv) * V + o_v, b_u, mask=m_v)
        b_q, b_k, b_g, b_v, b_beta = n_q, n_k, n_g, n_v, n_beta
    if STORE_FINAL_STATE:
        tl.store(final_state + o_s, b_s, mask=m_s)
