"""A chunk as tokens of its blocks, for products of decays between tokens.

The 64 tokens of a chunk are 4 blocks of 16. A tuple of 16 tensors [4, BK] holds token i of every
block in its place i: a thread then has all tokens of a block and a channel in registers, and what
runs along time costs no exchange between threads. Decays between tokens are products of at most 64
decays of single tokens: exact like differences of gates, of one exponential each.
"""

import triton
import triton.language as tl

from ..delta.gates import log2_gate

BLOCK = tl.constexpr(16)
BLOCKS = tl.constexpr(4)


@triton.jit
def load_tokens(p, stride, o_k, m_k, b_len):
    """16 tensors [4, BK] of rows at p, p + stride, ...; 0 past b_len rows and outside m_k."""
    o_b = tl.arange(0, BLOCKS) * BLOCK
    # one address a thread, steps of all threads alike: few registers
    p_x = p + (o_b * stride)[:, None] + o_k[None, :]
    tokens = ()
    for i in tl.static_range(BLOCK):
        m_x = (o_b < b_len - i)[:, None] & m_k[None, :]
        tokens = tokens + (tl.load(p_x + i * stride, mask=m_x, other=0.0),)
    return tokens


@triton.jit
def load_decays(p, stride, o_k, m_k, b_len):
    """16 tensors [4, BK] of decays exp(g), from natural-log gates; 1 past the end."""
    gates = load_tokens(p, stride, o_k, m_k, b_len)
    decays = ()
    for i in tl.static_range(BLOCK):
        decays = decays + (tl.exp2(log2_gate(gates[i].to(tl.float32))),)
    return decays


@triton.jit
def join_tokens(tokens, BK: tl.constexpr):
    """[64, BK] from 16 tensors [4, BK], in the order of time."""
    for _ in tl.static_range(4):
        joined = ()
        for i in tl.static_range(len(tokens) // 2):
            joined = joined + (tl.join(tokens[2 * i], tokens[2 * i + 1]),)
        tokens = joined
    return tl.reshape(tl.permute(tokens[0], (0, 5, 4, 3, 2, 1)), (BLOCKS * BLOCK, BK))


@triton.jit
def prefix_decays(decays, SIZE: tl.constexpr):
    """For every token the decay from before its group of SIZE tokens until after itself."""
    products = ()
    for i in tl.static_range(BLOCK):
        if i % SIZE == 0:
            b_w = decays[i]
        else:
            b_w = b_w * decays[i]
        products = products + (b_w,)
    return products


@triton.jit
def suffix_decays(decays, SIZE: tl.constexpr):
    """For every token the decay after itself to the end of its group of SIZE tokens."""
    products = ()
    for i in tl.static_range(BLOCK - 1, -1, -1):
        if i % SIZE == SIZE - 1:
            b_w = tl.full(decays[i].shape, 1.0, tl.float32)
        else:
            b_w = b_w * decays[i + 1]
        products = (b_w,) + products
    return products


@triton.jit
def block_decays(b_whole):
    """The decays [BK] of the four blocks, from [4, BK]."""
    o_b = tl.arange(0, BLOCKS)[:, None]
    b_0 = tl.sum(tl.where(o_b == 0, b_whole, 0.0), 0)
    b_1 = tl.sum(tl.where(o_b == 1, b_whole, 0.0), 0)
    b_2 = tl.sum(tl.where(o_b == 2, b_whole, 0.0), 0)
    b_3 = tl.sum(tl.where(o_b == 3, b_whole, 0.0), 0)
    return b_0, b_1, b_2, b_3


@triton.jit
def by_block(i_b, b_0, b_1, b_2, b_3):
    """[n, BK]: of the four vectors [BK] that of block i_b [n, 1]."""
    b_low = tl.where(i_b == 0, b_0[None, :], b_1[None, :])
    b_high = tl.where(i_b == 2, b_2[None, :], b_3[None, :])
    return tl.where(i_b < 2, b_low, b_high)


@triton.jit
def over_blocks(b_0, b_1, b_2, b_3, BK: tl.constexpr):
    """[64, BK]: for the tokens of each block its vector [BK]."""
    b_x = by_block(tl.arange(0, BLOCKS)[:, None], b_0, b_1, b_2, b_3)
    tokens = ()
    for _ in tl.static_range(BLOCK):
        tokens = tokens + (b_x,)
    return join_tokens(tokens, BK)
