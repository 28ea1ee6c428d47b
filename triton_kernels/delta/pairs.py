"""Decayed products of the token pairs of one chunk, exact for every gate.

P_ij = sum_d x_id y_jd exp2(G_id - G_jd), i >= j, cannot be split into a factor of i and one of j
without a reference, and no single reference is safe for 64 tokens. Pairs are therefore grouped by
dyadic levels: at level s (32, 16, ..., 1) row i lies in the upper and column j in the lower half of
the same block of 2s tokens, and both factors go through the last token of the lower half:

    exp2(G_i - G_j) = exp2(G_i - G_ref) exp2(G_ref - G_j),    j <= ref < i

Both are at most 1, so nothing overflows however fast a channel forgets, and the reference is never
later than the row it serves. A token has one factor per level, exp2(-|G - G_ref|), whichever half
it is in. With gates known to lie in [-5, 0] the last four levels are one: blocks of 16 go through
their first token, with the exponent centred by a constant.

The exponents are sums of gates over a few tokens, made by one product with a 0/1 matrix each: no
difference of long sums, so a gate of -1000 spoils nothing after it.
"""

import triton
import triton.language as tl

# half the range of 15 gates of -5 in base 2: rows then use exponents within +-54.1
CENTRE = tl.constexpr(54.1)
# rows of the 0/1 matrices in `sums`: levels 32, 16, ..., 1 are 0 to 5
BLOCK_SUM = tl.constexpr(6)  # within blocks of 16, from after the first token up to i
PREFIX_SUM = tl.constexpr(7)  # G: from the chunk's start up to i
SUFFIX_SUM = tl.constexpr(8)  # G_last - G: after i to the chunk's end


@triton.jit
def split_gate(b_g, SPLIT: tl.constexpr):
    """The gate as two fp16 terms (22 bits), or in fp32 twice for the exact products of fp32 inputs.
    """
    if SPLIT:
        b_high = b_g.to(tl.float16)
        return b_high, (b_g - b_high.to(tl.float32)).to(tl.float16)
    else:
        return b_g, b_g


@triton.jit
def sum_gates(sums, INDEX: tl.constexpr, b_high, b_low, BT: tl.constexpr, SPLIT: tl.constexpr):
    """[BT, BK] fp32: for every row i the sum of the gates of the tokens j with sums[INDEX, i, j] =
    1.

    The 0/1 matrices [9, BT, BT] (fp16, fp32 without SPLIT) come from memory: made in registers, all
    of them would be kept there throughout.
    """
    o_t = tl.arange(0, BT)
    b_m = tl.load(sums + INDEX * BT * BT + o_t[:, None] * BT + o_t[None, :])
    if SPLIT:
        return tl.dot(b_m, b_low, tl.dot(b_m, b_high))
    else:
        return tl.dot(b_m, b_high, input_precision="tf32x3")


@triton.jit
def level_mask(LEVEL: tl.constexpr, BT: tl.constexpr):
    """[BT, BT]: pairs (i, j) that belong to a level."""
    o_t = tl.arange(0, BT)
    m_same = (o_t[:, None] // (2 * LEVEL)) == (o_t[None, :] // (2 * LEVEL))
    return m_same & ((o_t[:, None] // LEVEL) % 2 == 1) & ((o_t[None, :] // LEVEL) % 2 == 0)


@triton.jit
def block_mask(BLOCK: tl.constexpr, BT: tl.constexpr):
    """[BT, BT]: pairs i >= j within a block of BLOCK tokens."""
    o_t = tl.arange(0, BT)
    m_same = (o_t[:, None] // BLOCK) == (o_t[None, :] // BLOCK)
    return m_same & (o_t[:, None] >= o_t[None, :])


@triton.jit
def unit_lower_inverse(b_L, BT: tl.constexpr, OPERAND: tl.constexpr):
    """(I + L)^-1 of a strictly lower [BT, BT] fp32 matrix, by exact block Schur complements 1, 2,
    ..., BT/2.

    [[A, 0], [C, D]]^-1 = [[A', 0], [-D' C A', D']]: the blocks C of a level are isolated by its
    mask. OPERAND is the dtype of the products: fp32 (three tf32 products each) or fp16, which has
    the mantissa of tf32 and room for every entry while beta |k|^2 < 2.
    """
    o_t = tl.arange(0, BT)
    b_X = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
    b_X -= tl.where(level_mask(1, BT), b_L, 0.0)
    for i_l in tl.static_range(1, 6):
        if 1 << i_l < BT:
            b_Xd = b_X.to(OPERAND)
            b_C = tl.where(level_mask(1 << i_l, BT), b_L, 0.0).to(OPERAND)
            b_C = tl.dot(b_C, b_Xd, input_precision="tf32x3").to(OPERAND)
            b_X -= tl.dot(b_Xd, b_C, input_precision="tf32x3")
    return b_X
