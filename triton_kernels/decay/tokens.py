"""A chunk as tokens of its blocks, for products of decays between tokens.

The 64 tokens of a chunk are 8 blocks of 8. A tuple of 8 tensors [8, BK] holds token i of every
block in its place i: a thread then has all tokens of a block and a channel in registers, and what
runs along time costs no exchange between threads. Decays between tokens are products of at most 64
decays of single tokens: exact like differences of gates, of one exponential each.

Blocks of 16 would save a product on the tensor cores, but double what is done token by token; and
the compiler's time grows with the square of the operations of a kernel.
"""

import triton
import triton.language as tl

from ..delta.gates import log2_gate

BLOCK = tl.constexpr(8)
BLOCKS = tl.constexpr(8)


@triton.jit
def load_tokens(p, stride, o_k, m_k, b_len):
    """8 tensors [8, BK] of rows at p, p + stride, ...; 0 past b_len rows and outside m_k."""
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
    """8 tensors [8, BK] of decays exp(g), from natural-log gates; 1 past the end."""
    gates = load_tokens(p, stride, o_k, m_k, b_len)
    decays = ()
    for i in tl.static_range(BLOCK):
        decays = decays + (tl.exp2(log2_gate(gates[i].to(tl.float32))),)
    return decays


@triton.jit
def join_tokens(tokens, BK: tl.constexpr):
    """[64, BK] from 8 tensors [8, BK], in the order of time."""
    for _ in tl.static_range(3):
        joined = ()
        for i in tl.static_range(len(tokens) // 2):
            joined = joined + (tl.join(tokens[2 * i], tokens[2 * i + 1]),)
        tokens = joined
    return tl.reshape(tl.permute(tokens[0], (0, 4, 3, 2, 1)), (BLOCKS * BLOCK, BK))


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
    """For every token the decay after itself to the end of its group of SIZE tokens; of blocks and
    their decays the same."""
    products = ()
    for i in tl.static_range(len(decays) - 1, -1, -1):
        if i % SIZE == SIZE - 1:
            b_w = tl.full(decays[i].shape, 1.0, tl.float32)
        else:
            b_w = b_w * decays[i + 1]
        products = (b_w,) + products
    return products


@triton.jit
def decays_before(blocks, SIZE: tl.constexpr):
    """For every block the decay from the start of its group of SIZE blocks until before itself."""
    products = ()
    for i in tl.static_range(len(blocks)):
        if i % SIZE == 0:
            b_w = tl.full(blocks[i].shape, 1.0, tl.float32)
        else:
            b_w = b_w * blocks[i - 1]
        products = products + (b_w,)
    return products


@triton.jit
def block_decays(b_whole):
    """The decays of the blocks, 8 tensors [BK], and their product, from [8, BK]."""
    o_b = tl.arange(0, BLOCKS)[:, None]
    blocks = ()
    for i in tl.static_range(BLOCKS):
        blocks = blocks + (tl.sum(tl.where(o_b == i, b_whole, 0.0), 0),)
    b_all = blocks[0]
    for i in tl.static_range(1, BLOCKS):
        b_all = b_all * blocks[i]
    return blocks, b_all


@triton.jit
def by_block(vectors):
    """[8, BK] from 8 tensors [BK]: row i is that of block i."""
    o_b = tl.arange(0, BLOCKS)[:, None]
    rows = ()
    for i in tl.static_range(BLOCKS):
        rows = rows + (vectors[i][None, :],)
    for i_bit in tl.static_range(3):
        chosen = ()
        for i in tl.static_range(len(rows) // 2):
            m_even = o_b // (1 << i_bit) % 2 == 0
            chosen = chosen + (tl.where(m_even, rows[2 * i], rows[2 * i + 1]),)
        rows = chosen
    return rows[0]


@triton.jit
def over_blocks(vectors, BK: tl.constexpr):
    """[64, BK]: for the tokens of each block its vector [BK]."""
    b_x = by_block(vectors)
    tokens = ()
    for _ in tl.static_range(BLOCK):
        tokens = tokens + (b_x,)
    return join_tokens(tokens, BK)
