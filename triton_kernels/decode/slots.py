"""Which tokens a program of the decode kernels works on, and which slots of the pool.

A pool is [slots, HV, K, V] (or [slots, HV, V, K]) with any distance between slots. A row is a
sequence of the call; it is padding if the slot that it reads lies outside the pool, and reads and
writes nothing then.
"""

import triton
import triton.language as tl


@triton.jit
def token_range(cu_seqlens, i_n, T, IS_VARLEN: tl.constexpr):
    """(batch, first token there, number of tokens) of row i_n, within the tensors whatever
    cu_seqlens holds. The first two are int64."""
    if IS_VARLEN:
        bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n).to(tl.int64), 0), T)
        eos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), 0), T)
        return bos * 0, bos, tl.maximum(eos - bos, 0).to(tl.int32)
    else:
        i_b = i_n.to(tl.int64)
        return i_b, i_b * 0, T


@triton.jit
def read_slot(state_indices, num_accepted, i_n, index_stride, S, has_accepted):
    """The slot that row i_n reads: with S > 0 columns the one of the last accepted token, the first
    one without num_accepted; -1 past the columns."""
    column = tl.load(num_accepted + i_n, mask=has_accepted > 0, other=1)
    column = tl.maximum(column, 1) - 1
    p_slot = state_indices + i_n.to(tl.int64) * index_stride + column
    return tl.load(p_slot, mask=column < tl.maximum(S, 1), other=-1)


@triton.jit
def slot_pointer(state, slot, slot_stride, ALIGNED: tl.constexpr):
    """Start of a slot. ALIGNED: slot_stride is a multiple of 8."""
    o_slot = slot.to(tl.int64) * slot_stride
    if ALIGNED:
        o_slot = tl.multiple_of(o_slot, 8)
    return state + o_slot


@triton.jit
def row_pointer(x, i_b, t, i_h, stride_b, stride_t, stride_h, ALIGNED: tl.constexpr):
    """Row of token t (int64) of batch i_b (int64) and a head. ALIGNED: all strides are multiples of
    8."""
    o_row = i_b * stride_b + t * stride_t + i_h.to(tl.int64) * stride_h
    if ALIGNED:
        o_row = tl.multiple_of(o_row, 8)
    return x + o_row


@triton.jit
def store_state(state, p_index, b_s, o_s, m_s, o_head, slots, slot_stride, ALIGNED: tl.constexpr):
    """A tile of the state into the slot at p_index, unless that lies outside the pool."""
    slot = tl.load(p_index)
    if (slot >= 0) & (slot < slots):
        p_s = slot_pointer(state, slot, slot_stride, ALIGNED) + o_head
        tl.store(p_s + o_s, b_s.to(state.dtype.element_ty), mask=m_s)


@triton.jit
def rounded(b_s, state):
    """fp32 values as the pool holds them."""
    return b_s.to(state.dtype.element_ty).to(tl.float32)


@triton.jit
def is_outside(cu_seqlens, i_t, N):
    """Whether a row of packed tensors lies before the first sequence or behind the last one."""
    return (i_t < tl.load(cu_seqlens)) | (i_t >= tl.load(cu_seqlens + N))
