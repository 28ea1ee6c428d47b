"""Token-serial delta rule, backward. S' is the decayed state, D the gradient of the state after the
write; GATES as in recurrent.py.

    reverse in time   dk_write = D u;  D += scale q do^T;  du = D^T k;  dv = beta du;
                      D -= k dv^T;  D *= exp(g)            (the D that is left is d_initial_state)
    forward in time   dq_state = scale S' do;  dk_erase = -S' dv;  dbeta = du . (v - S'^T k);
                      dot = scale u . do
    rows              dq = dq_state + dot k;  dk = dk_erase + dk_write + dot q
    gate              dg = suffix sum of q dq_state + k (dk_erase - dk_write)

What a token reads of its own write (dot) would enter the suffix sum twice with opposite signs and
drown the gradients of fast gates in rounding; without it every term has decayed. The sum starts
anew every CHUNK tokens and at the sequence's end: there rows of <S', D> stand for - k dk_write,
with D before the token reads (d_final_state at the end). Rounding does not pile up over sequences.

u is saved by the forward: undoing the decay would divide by exp(-1000), hence two passes. Sums over
V come out once per V tile; they and the value heads of a key head are added in a fixed order, fp32.
"""

import triton
import triton.language as tl

from .gates import LOG2_GATE_FLOOR, LOG2E, beta_bwd, beta_fwd, gate_bwd, l2norm_bwd, l2norm_fwd
from .recurrent import (
    decay_state,
    gate_index,
    gate_parameters,
    gate_pointers,
    key_row,
    load_gates,
    log2_gate_of,
    sequence_range,
    state_offsets,
)


@triton.jit
def ends_chunk(i_t, bos, eos, CHUNK: tl.constexpr):
    """Whether token i_t ends a chunk before the last of its sequence. Such ends are at least CHUNK
    tokens apart, whatever sequences they are in: (i_t + 1) // CHUNK numbers them.
    """
    return ((i_t + 1 - bos) % CHUNK == 0) & (i_t + 1 < eos)


@triton.jit(do_not_specialize=["scale", "lower_bound", "T", "tokens"])
def fused_recurrent_delta_bwd_kernel_reverse(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    g,  # [B, T, HV, GATES], or None without gates
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, GATES] or None
    bounds,  # [N+1] int64 if IS_VARLEN (then B = 1), else None
    u,  # [B, T, HV, V] fp32
    do,  # [B, T, HV, V]
    dht,  # [N, HV, K, V], or [N, HV, V, K] if STATE_V_FIRST, or None
    dv,  # [B, T, HV, V]
    du,  # [B, T, HV, V] fp32
    dk_write,  # [NV, B, T, HV, K] fp32
    dh,  # [ceil(tokens / CHUNK), HV, K, V] or [.., V, K] fp32: D at the ends of chunks
    dh0,  # as dht, or None
    scale,
    lower_bound,
    T,
    tokens,  # B * T
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    USE_GATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    HAS_DHT: tl.constexpr,
    STORE_DH0: tl.constexpr,
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
    if HAS_DHT:
        b_d = tl.load(dht + o_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_d = tl.zeros([BK, BV], dtype=tl.float32)
    o_g = gate_index(o_k, GATES)
    b_a_log, b_bias = gate_parameters(A_log, dt_bias, i_hv, o_g, m_k, GATES, HAS_A_LOG, HAS_BIAS)

    p_dk = dk_write + (i_v.to(tl.int64) * tokens * HV + i_hv) * K + o_k
    for i in range(0, eos - bos):
        i_t = eos - 1 - i
        if ends_chunk(i_t, bos, eos, CHUNK):
            o_h = state_offsets((i_t + 1) // CHUNK * HV + i_hv, o_k, o_v, K, V, STATE_V_FIRST)
            tl.store(dh + o_h, b_d, mask=m_s)
        o_q = (i_t * H + i_h) * K + o_k
        o_o = (i_t * HV + i_hv) * V + o_v
        b_q = key_row(tl.load(q + o_q, mask=m_k, other=0.0), USE_L2NORM) * scale
        b_k = key_row(tl.load(k + o_q, mask=m_k, other=0.0), USE_L2NORM)
        b_g = load_gates(gate_pointers(g, i_t * HV + i_hv, o_g, GATES), m_k, GATES)
        b_g = log2_gate_of(b_g, b_a_log, b_bias, lower_bound, USE_GATE, BOUNDED)
        b_beta = tl.load(beta + i_t * HV + i_hv).to(tl.float32)
        b_beta = beta_fwd(b_beta, USE_BETA_SIGMOID, NEG_EIGVAL)
        b_u = tl.load(u + o_o, mask=m_v, other=0.0)
        b_do = tl.load(do + o_o, mask=m_v, other=0.0).to(tl.float32)

        # both reductions start from D before scale q do^T is added
        b_dk = tl.sum(b_d * b_u[None, :], 1)
        b_du = tl.sum(b_d * b_k[:, None], 0) + b_do * tl.sum(b_q * b_k, 0)
        b_dv = b_beta * b_du
        b_d += b_q[:, None] * b_do[None, :] - b_k[:, None] * b_dv[None, :]
        b_d = decay_state(b_d, b_g, GATES)
        tl.store(dv + o_o, b_dv.to(dv.dtype.element_ty), mask=m_v)
        tl.store(du + o_o, b_du, mask=m_v)
        tl.store(p_dk + i_t * (HV * K), b_dk, mask=m_k)
    if STORE_DH0:
        tl.store(dh0 + o_s, b_d.to(dh0.dtype.element_ty), mask=m_s)


@triton.jit(do_not_specialize=["scale", "lower_bound", "T", "N", "tokens"])
def fused_recurrent_delta_bwd_kernel_forward(
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV, GATES], or None without gates
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, GATES] or None
    initial_state,  # [N, HV, K, V], or [N, HV, V, K] if STATE_V_FIRST, or None
    bounds,  # [N+1] int64 if IS_VARLEN (then B = 1), else None
    u,  # [B, T, HV, V] fp32
    do,  # [B, T, HV, V]
    du,  # [B, T, HV, V] fp32
    dh,  # [ceil(tokens / CHUNK), HV, K, V] or [.., V, K] fp32: D at the ends of chunks
    dht,  # as initial_state, or None
    dq_state,  # [NV, B, T, HV, K] fp32
    dk_erase,  # [NV, B, T, HV, K] fp32
    dbeta,  # [NV, B, T, HV] fp32
    dot,  # [NV, B, T, HV] fp32
    dg_chunk,  # [NV, ceil(tokens / CHUNK), HV, K] fp32: rows of <S', D> at the ends of chunks
    dg_end,  # [NV, N, HV, K] fp32: rows of <S', d_final_state> at the last token, or None
    scale,
    lower_bound,
    T,
    N,
    tokens,  # B * T
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    USE_GATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    HAS_DHT: tl.constexpr,
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

    o_tile = i_v.to(tl.int64) * tokens * HV + i_hv
    # the write waits for the next token: what is left after the last is its S'
    b_k = tl.zeros([BK], dtype=tl.float32)
    b_u = tl.zeros([BV], dtype=tl.float32)
    for start in range(bos, eos, CHUNK):
        end = tl.minimum(start + CHUNK, eos)
        for i_t in range(start, end):
            o_o = (i_t * HV + i_hv) * V + o_v
            b_g = load_gates(gate_pointers(g, i_t * HV + i_hv, o_g, GATES), m_k, GATES)
            b_g = log2_gate_of(b_g, b_a_log, b_bias, lower_bound, USE_GATE, BOUNDED)
            b_beta = tl.load(beta + i_t * HV + i_hv).to(tl.float32)
            b_beta = beta_fwd(b_beta, USE_BETA_SIGMOID, NEG_EIGVAL)
            b_s = decay_state(b_s + b_k[:, None] * b_u[None, :], b_g, GATES)
            b_k = tl.load(k + (i_t * H + i_h) * K + o_k, mask=m_k, other=0.0)
            b_k = key_row(b_k, USE_L2NORM)
            b_v = tl.load(v + o_o, mask=m_v, other=0.0).to(tl.float32)
            b_u = tl.load(u + o_o, mask=m_v, other=0.0)
            b_du = tl.load(du + o_o, mask=m_v, other=0.0)
            b_do = tl.load(do + o_o, mask=m_v, other=0.0).to(tl.float32) * scale

            b_dbeta = tl.sum(b_du * (b_v - tl.sum(b_s * b_k[:, None], 0)), 0)
            b_dk = -tl.sum(b_s * (b_beta * b_du)[None, :], 1)
            b_dq = tl.sum(b_s * b_do[None, :], 1)
            o_p = (o_tile + i_t * HV) * K + o_k
            tl.store(dq_state + o_p, b_dq, mask=m_k)
            tl.store(dk_erase + o_p, b_dk, mask=m_k)
            tl.store(dbeta + o_tile + i_t * HV, b_dbeta)
            tl.store(dot + o_tile + i_t * HV, tl.sum(b_u * b_do, 0))
        if end < eos:
            i_end = end // CHUNK * HV + i_hv
            o_h = state_offsets(i_end, o_k, o_v, K, V, STATE_V_FIRST)
            b_end = tl.sum(b_s * tl.load(dh + o_h, mask=m_s, other=0.0), 1)
            p_end = dg_chunk + (i_v.to(tl.int64) * tl.cdiv(tokens, CHUNK) * HV + i_end) * K + o_k
            tl.store(p_end, b_end, mask=m_k)
    if HAS_DHT:
        b_dht = tl.load(dht + o_s, mask=m_s, other=0.0).to(tl.float32)
        p_end = dg_end + (i_v.to(tl.int64) * N * HV + i_nh) * K + o_k
        tl.store(p_end, tl.sum(b_s * b_dht, 1), mask=m_k)


@triton.jit(do_not_specialize=["tokens"])
def fused_recurrent_delta_bwd_kernel_qk(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    dq_state,  # [NV, B, T, HV, K] fp32
    dk_write,  # [NV, B, T, HV, K] fp32
    dk_erase,  # [NV, B, T, HV, K] fp32
    dot,  # [NV, B, T, HV] fp32
    dq,  # [B, T, H, K]
    dk,  # [B, T, H, K]
    tokens,  # B * T
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    NV: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    USE_L2NORM: tl.constexpr,
):
    i_t = (tl.program_id(0) // H).to(tl.int64) * BT + tl.arange(0, BT)
    i_h = (tl.program_id(0) % H).to(tl.int64)
    o_k = tl.arange(0, BK)
    m_t = i_t < tokens
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_dot = tl.zeros([BT], dtype=tl.float32)
    G: tl.constexpr = HV // H
    i_row = i_t * HV + i_h * G
    for _ in range(0, NV):
        for i_g in range(0, G):
            o_p = (i_row + i_g)[:, None] * K + o_k[None, :]
            b_dq += tl.load(dq_state + o_p, mask=m_tk, other=0.0)
            b_dk += tl.load(dk_write + o_p, mask=m_tk, other=0.0)
            b_dk += tl.load(dk_erase + o_p, mask=m_tk, other=0.0)
            b_dot += tl.load(dot + i_row + i_g, mask=m_t, other=0.0)
        i_row += tl.cast(tokens, tl.int64) * HV
    o_q = (i_t * H + i_h)[:, None] * K + o_k[None, :]
    b_q = tl.load(q + o_q, mask=m_tk, other=0.0).to(tl.float32)
    b_k = tl.load(k + o_q, mask=m_tk, other=0.0).to(tl.float32)
    if USE_L2NORM:
        b_dq += b_dot[:, None] * l2norm_fwd(b_k, 1)
        b_dk += b_dot[:, None] * l2norm_fwd(b_q, 1)
        b_dq = l2norm_bwd(b_dq, b_q, 1)
        b_dk = l2norm_bwd(b_dk, b_k, 1)
    else:
        b_dq += b_dot[:, None] * b_k
        b_dk += b_dot[:, None] * b_q
    tl.store(dq + o_q, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + o_q, b_dk.to(dk.dtype.element_ty), mask=m_tk)


@triton.jit
def sum_of_tiles(p, m_k, rows, HV: tl.constexpr, K: tl.constexpr, NV: tl.constexpr):
    """Sum of a row [BK] over the first axis of [NV, rows, HV, K]."""
    b_sum = tl.load(p, mask=m_k, other=0.0)
    for _ in range(1, NV):
        p += tl.cast(rows, tl.int64) * (HV * K)
        b_sum += tl.load(p, mask=m_k, other=0.0)
    return b_sum


@triton.jit(do_not_specialize=["lower_bound", "T", "N", "tokens"])
def fused_recurrent_delta_bwd_kernel_gate(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    g,  # [B, T, HV, GATES], or None without gates
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, GATES] or None
    bounds,  # [N+1] int64 if IS_VARLEN (then B = 1), else None
    dq_state,  # [NV, B, T, HV, K] fp32
    dk_write,  # [NV, B, T, HV, K] fp32
    dk_erase,  # [NV, B, T, HV, K] fp32
    dbeta_parts,  # [NV, B, T, HV] fp32
    dg_chunk,  # [NV, ceil(tokens / CHUNK), HV, K] fp32
    dg_end,  # [NV, N, HV, K] fp32, or None
    dg,  # as g
    dbeta,  # [B, T, HV]
    dA_log,  # [N, HV] fp32: one term a sequence, 0 unless USE_GATE
    d_dt_bias,  # [N, HV, GATES] fp32, likewise
    lower_bound,
    T,
    N,
    tokens,  # B * T
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    GATES: tl.constexpr,
    NV: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    USE_GATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    HAS_DHT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    i_nh = tl.program_id(0).to(tl.int64)
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    bos, eos = sequence_range(bounds, i_n, T, IS_VARLEN)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    BG: tl.constexpr = BK if GATES > 1 else 1
    o_g = tl.arange(0, BG)
    m_g = o_g < GATES
    b_a_log, b_bias = gate_parameters(A_log, dt_bias, i_hv, o_g, m_g, GATES, HAS_A_LOG, HAS_BIAS)

    b_suffix = tl.zeros([BK], dtype=tl.float32)  # what comes from behind the block
    if HAS_DHT:
        b_suffix = sum_of_tiles(dg_end + i_nh * K + o_k, m_k, N, HV, K, NV)
    b_da = tl.zeros([BG], dtype=tl.float32)
    b_dbias = tl.zeros([BG], dtype=tl.float32)
    blocks = tl.cdiv(eos - bos, BT)
    for i in range(0, blocks):
        i_t = bos + (blocks - 1 - i) * BT + tl.arange(0, BT)
        m_t = i_t < eos
        m_tk = m_t[:, None] & m_k[None, :]
        o_q = (i_t * H + i_h)[:, None] * K + o_k[None, :]
        b_q = tl.load(q + o_q, mask=m_tk, other=0.0).to(tl.float32)
        b_k = tl.load(k + o_q, mask=m_tk, other=0.0).to(tl.float32)
        if USE_L2NORM:
            b_q = l2norm_fwd(b_q, 1)
            b_k = l2norm_fwd(b_k, 1)
        end = bos + (blocks - i) * BT
        if ends_chunk(end - 1, bos, eos, CHUNK):
            p_end = dg_chunk + (end // CHUNK * HV + i_hv) * K + o_k
            b_suffix = sum_of_tiles(p_end, m_k, tl.cdiv(tokens, CHUNK), HV, K, NV)
        m_write = m_t & (i_t + 1 < eos) & ((i_t + 1 - bos) % CHUNK != 0)
        m_write = m_write[:, None] & m_k[None, :]
        b_c = tl.zeros([BT, BK], dtype=tl.float32)
        b_dbeta = tl.zeros([BT], dtype=tl.float32)
        i_row = i_t * HV + i_hv
        for _ in range(0, NV):
            o_p = i_row[:, None] * K + o_k[None, :]
            b_dq = tl.load(dq_state + o_p, mask=m_tk, other=0.0)
            b_dk = tl.load(dk_erase + o_p, mask=m_tk, other=0.0)
            b_dk -= tl.load(dk_write + o_p, mask=m_write, other=0.0)
            b_c += b_q * b_dq + b_k * b_dk
            b_dbeta += tl.load(dbeta_parts + i_row, mask=m_t, other=0.0)
            i_row += tl.cast(tokens, tl.int64) * HV
        if GATES > 0:
            b_dg = tl.cumsum(b_c, 0, reverse=True) + b_suffix[None, :]
            b_suffix += tl.sum(b_c, 0)
            if BG == 1:
                # the gate of all channels
                b_dg = tl.sum(b_dg, 1, keep_dims=True)
            m_tg = m_t[:, None] & m_g[None, :]
            p_g = (i_t * HV + i_hv)[:, None] * GATES + o_g[None, :]
            b_g = tl.load(g + p_g, mask=m_tg, other=0.0).to(tl.float32)
            if USE_GATE:
                b_dg, b_da_t = gate_bwd(b_dg, b_g, b_a_log, b_bias[None, :], lower_bound, BOUNDED)
                b_da += tl.sum(tl.where(m_tg, b_da_t, 0.0), 0)
                b_dbias += tl.sum(tl.where(m_tg, b_dg, 0.0), 0)
            else:
                # at the floor the gate is constant
                b_dg = tl.where(b_g * LOG2E > LOG2_GATE_FLOOR, b_dg, 0.0)
            tl.store(dg + p_g, b_dg.to(dg.dtype.element_ty), mask=m_tg)
        o_b = i_t * HV + i_hv
        b_beta = tl.load(beta + o_b, mask=m_t, other=0.0).to(tl.float32)
        b_dbeta = beta_bwd(b_dbeta, b_beta, USE_BETA_SIGMOID, NEG_EIGVAL)
        tl.store(dbeta + o_b, b_dbeta.to(dbeta.dtype.element_ty), mask=m_t)
    tl.store(dA_log + i_nh, tl.sum(b_da, 0))
    tl.store(d_dt_bias + i_nh * GATES + o_g, b_dbias, mask=m_g)
