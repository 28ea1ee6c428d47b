"""Scalar gates of a chunk, and tiles of pairs: small device functions shared by the kernels."""

import triton
import triton.language as tl

from ..delta.gates import LOG2E, log2_gate

# stands for the sum of gates after one of -inf: differences of two such sums are 0, not NaN
LOG2_SUM_FLOOR = tl.constexpr(-1e30)


@triton.jit
def load_gamma(g_gamma, i_hv, USE_G_GAMMA: tl.constexpr):
    """The log gate of every token of a head, fp32; 0 without one."""
    b_gamma = 0.0
    if USE_G_GAMMA:
        b_gamma = tl.load(g_gamma + i_hv).to(tl.float32)
    return b_gamma


@triton.jit
def load_gates(g, i_first, o_g, m_t, BT: tl.constexpr, USE_G: tl.constexpr):
    """Log gates (or sums of them) of the tokens at i_first + o_g, [BT] fp32; 0 without any."""
    b_g = tl.zeros([BT], dtype=tl.float32)
    if USE_G:
        b_g += tl.load(g + i_first + o_g, mask=m_t, other=0.0).to(tl.float32)
    return b_g


@triton.jit
def sum_gates(
    b_g,  # [BT] log gates (natural), or their in-chunk sums with CUMULATIVE
    b_gamma,  # log gate of every token
    o_t,  # [BT] positions in the chunk
    b_len,  # tokens from the chunk's first to the sequence's end, > 0
    BT: tl.constexpr,
    USE_G: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    GATE_DTYPE: tl.constexpr,
):
    """(in-chunk inclusive sums of the gates in base 2, [BT]; the sum at the last token).

    Gates are floored one by one, so that -inf gives no NaN; rows past the end do not decay. Sums of
    many floors have few digits left in float32: float32 inputs take them in float64.
    """
    if CUMULATIVE:
        b_G = (b_g + b_gamma * (o_t + 1)) * LOG2E
        b_G = tl.maximum(b_G, LOG2_SUM_FLOOR, propagate_nan=tl.PropagateNan.ALL).to(GATE_DTYPE)
    elif USE_G:
        b_x = tl.where(o_t < b_len, log2_gate(b_g + b_gamma), 0.0)
        b_G = tl.cumsum(b_x.to(GATE_DTYPE), 0)
    else:
        b_G = log2_gate(b_g + b_gamma).to(GATE_DTYPE) * tl.minimum(o_t + 1, b_len)
    last = tl.minimum(b_len, BT) - 1
    return b_G, tl.sum(tl.where(o_t == last, b_G, 0.0), 0)


@triton.jit
def decay_over(x):
    """exp2 in float32 of a sum of gates, or of a difference of two."""
    return tl.exp2(x.to(tl.float32))


@triton.jit
def pair_decay(b_row, b_col, m_pair, USE_DECAY: tl.constexpr):
    """exp2(b_row - b_col) where m_pair holds, else 0: a difference of gate sums, never a product.

    b_row, b_col: sums of gates that broadcast against each other.
    """
    if USE_DECAY:
        return tl.exp2(tl.where(m_pair, (b_row - b_col).to(tl.float32), float("-inf")))
    else:
        return tl.where(m_pair, 1.0, 0.0)
