"""The documented functions of the stages of the delta families. Each calls one operator."""

import torch
from torch import Tensor

_solve_tril = torch.ops.flaop.solve_tril.default
_recompute_w_u = torch.ops.flaop.recompute_w_u.default
_chunk_delta_fwd_h = torch.ops.flaop.chunk_delta_fwd_h.default


def solve_tril(L: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """The inverse (I + L)^-1 of each chunk's strictly lower triangular L.

    Differentiable once: with X the result, dL = -X^T dX X^T below the diagonal.

    Args:
        L: [B, T, H, BT], each token its row of the chunk's matrix; BT = 16, 32 or 64 tokens make a
            chunk. float32, bfloat16 or float16 (float64 on the CPU). Only what is strictly lower is
            read.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64; needs B = 1. Chunks start
            anew with each sequence; tokens outside have zero rows.

    Returns:
        [B, T, H, BT] in the dtype of L, computed in float32 (float64): ones on the diagonal, zeros
        above it.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: double backward.

    Cost: one kernel that reads L and writes the result; the backward is one more.

    Reference: Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484.

    Example:
        >>> import torch, flaop
        >>> L = torch.rand(16, 16).tril(-1)
        >>> X = flaop.solve_tril(L.view(1, 16, 1, 16)).view(16, 16)
        >>> torch.allclose(X @ (torch.eye(16) + L), torch.eye(16), atol=1e-4)
        True
    """
    return _solve_tril(L, cu_seqlens)


def recompute_w_u(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    *,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the tokens of a chunk erase with (W) and write without its past (U).

    With G_i the sum of all gates from the first token of the chunk to i, and A its inverse:

        W = A (beta e^G k),   U = A (beta v)

    Forward only: the path ops have the gradients.

    Args:
        k: keys [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU). K <= 256.
        v: values [B, T, HV, V], dtype of k; HV is a multiple of H.
        beta: write strength [B, T, HV], any floating dtype.
        A: [B, T, HV, BT] as `flaop.solve_tril` gives it; float32, bfloat16 or float16.
        g: gate of each head [B, T, HV]; gk: of key channels [B, T, HV, K]. Sums within chunks,
            natural logarithms, as `flaop.chunk_local_cumsum` gives with chunk_size BT; any floating
            dtype; finite.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64; needs B = 1. Tokens outside
            them have zero rows.

    Returns:
        w [B, T, HV, K] and u [B, T, HV, V] in the dtype of k.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: a gradient is needed.

    Cost: one kernel, all chunks side by side.

    Reference: Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484.

    Example:
        >>> import torch, flaop
        >>> k, v, beta = torch.randn(1, 40, 1, 8), torch.randn(1, 40, 2, 4), torch.rand(1, 40, 2)
        >>> w, u = flaop.recompute_w_u(k, v, beta, flaop.solve_tril(torch.zeros(1, 40, 2, 16)))
        >>> torch.equal(u, beta.unsqueeze(-1) * v)
        True
    """
    return _recompute_w_u(k, v, beta, A, g, gk, cu_seqlens)


def chunk_delta_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The state that enters each chunk under the delta rule, and what its tokens write.

    With G_i the sum of all gates from the first token of the chunk to i, and C its last token:

        h = S                                             the state before the chunk
        V' = U - W S
        S <- e^(G_C) S + sum over i of (k_i e^(G_C - G_i)) V'_i^T

    Forward only: the path ops have the gradients.

    Args:
        k: keys [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU). K <= 256.
        w: [B, T, HV, K] and u: [B, T, HV, V] as `flaop.recompute_w_u` gives them, dtype of k; HV is
            a multiple of H.
        g: gate of each head [B, T, HV]; gk: of key channels [B, T, HV, K]. Sums within chunks,
            natural logarithms, as `flaop.chunk_local_cumsum` gives with the same chunk_size; any
            floating dtype; finite.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32, bfloat16 or
            float16. None means zeros.
        output_final_state: return the state after the last token.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64; needs B = 1. Tokens outside
            them have zero V'.
        chunk_size: tokens of a chunk: 16, 32 or 64.
        state_v_first: states are [.., V, K].

    Returns:
        h [R, HV, K, V] ([R, HV, V, K] with state_v_first), bfloat16 for bfloat16 inputs, else
        float32 (float64 for float64); R = B ceil(T / chunk_size), row i B + b for chunk i of batch
        entry b; packed R = max(ceil(T / chunk_size) + N - 1, 0), the chunks of the sequences one
        after another, then zeros. V' [B, T, HV, V] in the dtype of u. And the final state [N, HV,
        K, V] in float32 (float64), or None.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: a gradient is needed.

    Cost: one kernel, its time proportional to the longest sequence.

    Reference: Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484.

    Example:
        >>> import torch, flaop
        >>> k, w = torch.randn(1, 100, 1, 16), torch.zeros(1, 100, 2, 16)
        >>> u = torch.rand(1, 100, 2, 8)
        >>> h, v_new, state = flaop.chunk_delta_fwd_h(k, w, u)
        >>> h.shape, torch.equal(v_new, u), state
        (torch.Size([2, 2, 16, 8]), True, None)
    """
    h, v_new, final_state = _chunk_delta_fwd_h(
        *(k, w, u, g, gk, initial_state, output_final_state, cu_seqlens),
        *(chunk_size, state_v_first),
    )
    return h, v_new, final_state if output_final_state else None
