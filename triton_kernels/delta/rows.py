"""Where a chunk lies, and row norms: small device functions shared by the chunk kernels."""

import triton
import triton.language as tl

from .gates import L2NORM_EPS, beta_fwd, gate_fwd, log2_gate


@triton.jit
def chunk_position(bounds, table, row, T, B, BT: tl.constexpr, packed):
    """(first token of the row's chunk in the flattened tensor, tokens from there to its sequence's
    end).

    Batched rows run over batches first, then chunks. The second value is <= 0 for a sentinel row.
    packed: a constexpr, or a number where one code serves batched and packed sequences.
    """
    if packed:
        i_n = tl.load(table + 2 * row)
        i_c = tl.load(table + 2 * row + 1)
        m_n = i_n >= 0
        start = tl.load(bounds + i_n, mask=m_n, other=0)
        end = tl.load(bounds + i_n + 1, mask=m_n, other=0)
    else:
        i_c = row // B
        start = (row % B).to(tl.int64) * T
        end = start + T
    start += i_c.to(tl.int64) * BT
    return start, (end - start).to(tl.int32)


@triton.jit
def reciprocal_norm(
    x, o_x, m_t, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, USE_L2NORM: tl.constexpr
):
    """[BT] fp32: 1 / sqrt(sum_d x^2 + eps) of rows at offsets o_x, or ones."""
    b_sum = tl.zeros([BT], dtype=tl.float32)
    if USE_L2NORM:
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_x = m_t[:, None] & (o_k < K)[None, :]
            b_x = tl.load(x + o_x[:, None] + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
            b_sum += tl.sum(b_x * b_x, 1)
        return tl.rsqrt(b_sum + L2NORM_EPS)
    else:
        return b_sum + 1.0


@triton.jit
def load_raw_gate(
    g, A_log, dt_bias, o_g, o_k, m_g, i_hv, K: tl.constexpr,
    HAS_A_LOG: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Raw gate [BT, BK], A_log (scalar) and dt_bias [1, BK] in fp32.

    What is absent or masked is 0.
    """
    b_x = tl.load(g + o_g[:, None] + o_k[None, :], mask=m_g, other=0.0).to(tl.float32)
    b_a = 0.0
    if HAS_A_LOG:
        b_a = tl.load(A_log + i_hv).to(tl.float32)
    b_bias = tl.zeros([1, o_k.shape[0]], dtype=tl.float32)
    if HAS_BIAS:
        p_bias = dt_bias + i_hv * K + o_k
        b_bias = tl.load(p_bias, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    return b_x, b_a, b_bias


@triton.jit
def load_gate(
    g,  # [B, T, HV, K]
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
    o_g,
    o_k,
    m_g,
    i_hv,
    lower_bound,
    K: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BOUND: tl.constexpr,
):
    """[BT, BK] fp32.

    The log gate in base 2, floored; 0 where masked, so that tails do not decay.
    """
    b_g, b_a, b_bias = load_raw_gate(
        g, A_log, dt_bias, o_g, o_k, m_g, i_hv, K, HAS_A_LOG, HAS_BIAS
    )
    if USE_GATE:
        b_g = gate_fwd(b_g, b_a, b_bias, lower_bound, HAS_BOUND)
    return tl.where(m_g, log2_gate(b_g), 0.0)


@triton.jit
def load_beta(
    beta, o_b, m_t, BETA_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr
):
    """[BT] fp32: activated beta of rows at offsets o_b; 0 where masked."""
    b_beta = tl.load(beta + o_b, mask=m_t, other=0.0).to(tl.float32)
    return tl.where(m_t, beta_fwd(b_beta, BETA_SIGMOID, NEG_EIGVAL), 0.0)


@triton.jit
def sequence_chunks(
    bounds, offsets, i_n, T, B, row0, row1, BT: tl.constexpr, packed
):
    """(first token, length, first row, first and end chunk) of a sequence within rows [row0, row1).

    The rows of its chunks are one apart in packed calls, B in batched ones. Those hold row0 and
    row1 at multiples of B: every sequence then has the same chunks. packed: as in chunk_position.
    """
    if packed:
        bos = tl.load(bounds + i_n)
        b_len = (tl.load(bounds + i_n + 1) - bos).to(tl.int32)
        first = tl.load(offsets + i_n)
        c0 = tl.maximum(row0 - first, 0)
        c1 = tl.minimum(row1 - first, tl.cdiv(b_len, BT))
    else:
        bos = i_n.to(tl.int64) * T
        b_len = T
        first = i_n
        c0 = row0 // B
        c1 = tl.minimum(row1 // B, tl.cdiv(T, BT))
    return bos, b_len, first, c0, c1
