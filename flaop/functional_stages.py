"""The documented functions of the stages, for new variants. Each calls one operator."""

import torch
from torch import Tensor

_chunk_local_cumsum = torch.ops.flaop.chunk_local_cumsum.default
_chunk_fwd_h = torch.ops.flaop.chunk_fwd_h.default
_chunk_fwd_o = torch.ops.flaop.chunk_fwd_o.default


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    *,
    reverse: bool = False,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Cumulative sums of a gate that start anew in each chunk.

        out_t = scale * sum of g from the first token of t's chunk to t, both included

    With reverse the sum goes from t to the last token of the chunk. Differentiable, as often as
    asked: the backward is the same sum in the other direction.

    Args:
        g: [B, T, HV] or [B, T, HV, K], any floating dtype; a natural logarithm where it is a gate.
        chunk_size: tokens of a chunk: 16, 32 or 64.
        reverse: sum towards the end of the chunk.
        scale: factor on the sums, e.g. 1 / ln 2 for gates in base 2.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64; needs B = 1. Chunks start
            anew with each sequence; tokens outside are zero.

    Returns:
        [B, T, HV] or [B, T, HV, K], float32.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.

    Cost: one kernel that reads g and writes the result.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.

    Example:
        >>> import torch, flaop
        >>> flaop.chunk_local_cumsum(torch.ones(1, 40, 1), 16)[0, 14:18, 0]
        tensor([15., 16.,  1.,  2.])
    """
    return _chunk_local_cumsum(g, chunk_size, reverse, scale, cu_seqlens)


def chunk_fwd_h(
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    split_size: int = 0,
    states_in_fp32: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The state that enters each chunk.

    With G_i the sum of all gates from the first token of the chunk to i, and C its last token:

        h = S                                             the state before the chunk
        S <- e^(G_C) S + sum over i of (k_i e^(G_C - G_i)) v_i^T

    Forward only: the path ops have the gradients.

    Args:
        k: keys [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU).
        v: values [B, T, HV, V], dtype of k; HV is a multiple of H.
        g: gate of each head [B, T, HV]; gk: of key channels [B, T, HV, K]; gv: of value channels
            [B, T, HV, V]. Sums within chunks, natural logarithms, as `flaop.chunk_local_cumsum`
            gives with the same chunk_size; any floating dtype; finite.
        g_gamma: gate of each head at every token [HV], not summed.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32, bfloat16 or
            float16. None means zeros.
        output_final_state: return the state after the last token.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64; needs B = 1.
        chunk_size: tokens of a chunk: 16, 32 or 64.
        split_size: 0, or a multiple of chunk_size: return only the states that enter every
            split_size tokens.
        states_in_fp32: return h in float32 for bfloat16 inputs too.
        state_v_first: states are [.., V, K].

    Returns:
        h [R, HV, K, V] ([R, HV, V, K] with state_v_first), bfloat16 for bfloat16 inputs, else
        float32 (float64 for float64). With s = split_size or chunk_size, R = B ceil(T / s), row
        i B + b for piece i of batch entry b; packed R = max(ceil(T / s) + N - 1, 0), the pieces of
        the sequences one after another, then zeros. And the final state [N, HV, K, V] in float32
        (float64), or None.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: a gradient is needed.

    Cost: one kernel, its time proportional to the longest sequence.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.

    Example:
        >>> import torch, flaop
        >>> k, v, g = torch.randn(1, 100, 2, 16), torch.randn(1, 100, 2, 8), -torch.rand(1, 100, 2)
        >>> h, state = flaop.chunk_fwd_h(k, v, g=flaop.chunk_local_cumsum(g, 64))
        >>> h.shape, state
        (torch.Size([2, 2, 16, 8]), None)
    """
    h, final_state = _chunk_fwd_h(
        *(k, v, g, g_gamma, gk, gv, initial_state, output_final_state, cu_seqlens),
        *(chunk_size, split_size, states_in_fp32, state_v_first),
    )
    return h, final_state if output_final_state else None


def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    *,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> Tensor:
    """The outputs, from the state that enters each chunk.

    With G_i the sum of all gates from the first token of the chunk to i:

        o_i = scale * (e^(G_i) h^T q_i + sum over j <= i of (q_i . k_j) e^(G_i - G_j) v_j)

    Forward only: the path ops have the gradients.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; one dtype: float32, bfloat16 or float16 (float64 on
            the CPU); HV is a multiple of H.
        h: as `flaop.chunk_fwd_h` returns it without split_size.
        g: gate of each head [B, T, HV], sums within chunks as `flaop.chunk_local_cumsum` gives
            with the same chunk_size; any floating dtype; finite.
        g_gamma: gate of each head at every token [HV], not summed.
        scale: factor on the output; None means K ** -0.5.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64; needs B = 1. Tokens
            outside them have zero outputs.
        chunk_size: tokens of a chunk: 16, 32 or 64.
        state_v_first: h is [R, HV, V, K].

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: a gradient is needed.

    Cost: one kernel, all chunks side by side.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.

    Example:
        >>> import torch, flaop
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16)
        >>> h, _ = flaop.chunk_fwd_h(k, v)
        >>> torch.allclose(flaop.chunk_fwd_o(q, k, v, h), flaop.linear_attn(q, k, v)[0], atol=1e-4)
        True
    """
    return _chunk_fwd_o(q, k, v, h, g, g_gamma, scale, cu_seqlens, chunk_size, state_v_first)
