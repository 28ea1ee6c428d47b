"""The device-built table of packed sequences: which (sequence, chunk) a row of the grid works on.

A grid may depend on shapes alone, so it has the upper bound max(ceil(T / BT) + N - 1, 0) of rows;
rows past the last chunk hold the sentinel -1. Boundaries are made monotone and clamped to [0, T]
first, so that no content of cu_seqlens can lead outside the tensors.
"""

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["T", "N"])
def chunk_table_kernel_bounds(
    cu_seqlens,  # [N+1] int32 or int64
    bounds,  # [N+1] int64: running maximum of clamp(cu_seqlens, 0, T)
    offsets,  # [N+1] int32: number of chunks before sequence n
    T,
    N,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    last = tl.zeros([], dtype=tl.int64)
    chunks = tl.zeros([], dtype=tl.int32)
    o_n = tl.arange(0, BN)
    for start in range(0, N + 1, BN):
        i_n = start + o_n
        m_n = i_n <= N
        b_end = tl.load(cu_seqlens + i_n, mask=m_n, other=0).to(tl.int64)
        b_end = tl.minimum(tl.maximum(b_end, 0), T)
        b_end = tl.maximum(tl.associative_scan(b_end, 0, _larger), last)
        # the boundary before: recomputed, not read back
        b_start = tl.load(cu_seqlens + i_n - 1, mask=m_n & (i_n > 0), other=0).to(tl.int64)
        b_start = tl.minimum(tl.maximum(b_start, 0), T)
        b_start = tl.maximum(tl.associative_scan(b_start, 0, _larger), last)
        b_length = tl.where(i_n > 0, b_end - b_start, 0)
        b_chunks = tl.where(m_n, (b_length + BT - 1) // BT, 0).to(tl.int32)
        tl.store(bounds + i_n, b_end, mask=m_n)
        tl.store(offsets + i_n, chunks + tl.cumsum(b_chunks, 0), mask=m_n)
        last = tl.max(b_end, 0)
        chunks += tl.sum(b_chunks, 0)


@triton.jit(do_not_specialize=["N", "rows"])
def chunk_table_kernel_rows(
    offsets,  # [N+1] int32
    table,  # [rows, 2] int32: sequence, chunk; -1 past the last
    N,
    rows,
    BR: tl.constexpr,
):
    i_r = tl.program_id(0) * BR + tl.arange(0, BR)
    m_r = i_r < rows
    # largest n with offsets[n] <= row; empty sequences share an offset and the last of them wins
    low = tl.zeros([BR], dtype=tl.int32)
    high = tl.zeros([BR], dtype=tl.int32) + N
    while tl.max(high - low, 0) > 0:
        middle = (low + high + 1) // 2
        below = tl.load(offsets + middle) <= i_r
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
    inside = i_r < tl.load(offsets + N)
    b_chunk = i_r - tl.load(offsets + low)
    tl.store(table + 2 * i_r, tl.where(inside, low, -1), mask=m_r)
    tl.store(table + 2 * i_r + 1, tl.where(inside, b_chunk, 0), mask=m_r)


@triton.jit(do_not_specialize=["T", "N", "D"])
def zero_outside_kernel(
    x,  # [T, D]
    bounds,  # [N+1] integers
    T,
    N,
    D,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Zeros in the rows that belong to no sequence.

    A program whose rows all belong to one returns.
    """
    start = tl.program_id(0) * BT
    first = tl.load(bounds)
    end = tl.load(bounds + N)
    if start >= first:
        if tl.minimum(start + BT, T) <= end:
            return
    o_t = start + tl.arange(0, BT)
    m_t = (o_t < T) & ((o_t < first) | (o_t >= end))
    for i_d in range(0, D, BD):
        o_d = i_d + tl.arange(0, BD)
        p_x = x + o_t[:, None].to(tl.int64) * D + o_d[None, :]
        b_zero = tl.zeros([BT, BD], dtype=x.dtype.element_ty)
        tl.store(p_x, b_zero, mask=m_t[:, None] & (o_d < D)[None, :])
