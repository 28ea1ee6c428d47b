"""The documented functions of the decay families simple_gla and gla. Each calls one operator."""

import torch
from torch import Tensor

from flaop import _paths

_simple_gla = torch.ops.flaop.simple_gla.default
_chunk_simple_gla = torch.ops.flaop.chunk_simple_gla.default
_fused_recurrent_simple_gla = torch.ops.flaop.fused_recurrent_simple_gla.default
_gla = torch.ops.flaop.gla.default
_chunk_gla = torch.ops.flaop.chunk_gla.default
_fused_recurrent_gla = torch.ops.flaop.fused_recurrent_gla.default


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one gate per head, by whichever path suits the call.

    Per sequence and value head, over a state S of shape [K, V], with the query and key head
    `i // (HV / H)` for value head i:

        S <- exp(g_t + g_gamma) S
        S <- S + k_t v_t^T
        o_t = scale * S^T q_t

    Short calls without a gradient (T <= 64; packed: T <= 64 N and T <= 1024) run token by token in
    one kernel (`fused_recurrent_simple_gla`), everything else in chunks (`chunk_simple_gla`).
    `flaop.explain` says which path a call takes, `flaop.backend` forces one. Under torch.compile
    the choice is a guard on T: one graph per side of the threshold.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU); any K.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q; HV is a multiple of H; any V.
        g: log decay (natural logarithm, <= 0) [B, T, HV], any floating dtype; -inf empties the
            state. None: no gate of each token.
        g_gamma: log decay of each head (natural logarithm, <= 0) [HV], any floating dtype, the
            same at every token and added to g. None: none. With neither this is linear attention.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32, bfloat16 or
            float16. N is B, or the number of packed sequences. None means zeros.
        output_final_state: return the state after the last token.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64, on the device of q, not
            decreasing; needs B = 1. Tokens outside them have zero outputs.
        state_v_first: states are [N, HV, V, K].
        chunk_size: 16, 32 or 64: a hint.
        split_size: 0, or a multiple of chunk_size (rounded up to 64): the backward keeps the
            states at these boundaries only and computes the others again, split after split. Of
            the memory of chunk states and their gradients about split_size / T and the kept
            states remain; the pass over the states runs twice.
        backend: "chunk" or "fused_recurrent" forces a path for this call; None takes the setting
            of `flaop.backend`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError: a shape, device or value breaks the above, or the forced path cannot serve it.
        TypeError: a dtype does.
        NotImplementedError: double backward.

    Cost: as the path it takes; choosing reads shapes and flags only, never a value.

    Reference: RetNet, arXiv:2307.08621, and Mamba-2, arXiv:2405.21060 (see `flaop.mamba2_ssd`).

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> g = F.logsigmoid(torch.randn(1, 100, 2))
        >>> o, state = flaop.simple_gla(q, k, v, g, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    o, final_state = _simple_gla(
        *(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
        _paths.BACKEND if backend is None else backend,
    )
    return o, final_state if output_final_state else None


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one gate per head, in chunks: parallel over time within a chunk.

    The recurrence, the arguments and the errors are those of `flaop.simple_gla`. Differentiable in
    q, k, v, g, g_gamma and initial_state, through o and through the final state. One opaque
    operator in compiled graphs: `flaop::chunk_simple_gla` without a gradient,
    `flaop::chunk_simple_gla_fwd` with one (the name to list in a selective-checkpoint policy).

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV]; g_gamma: [HV]; one dtype for q, k and
            v, any floating dtype for the gates, which are natural logarithms, <= 0.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size: as in `flaop.simple_gla`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.simple_gla`.

    Cost: the forward keeps its inputs and nothing else for the backward, which computes the states
    of the chunks again: [HV, K, V] for each 64 tokens, and as much for their gradients, unless
    split_size bounds both.

    Reference: RetNet, arXiv:2307.08621, and Mamba-2, arXiv:2405.21060.

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, k, v = (torch.randn(1, 200, 2, 64, requires_grad=True) for _ in range(3))
        >>> g = F.logsigmoid(torch.randn(1, 200, 2))
        >>> o, _ = flaop.chunk_simple_gla(q, k, v, g, split_size=128)
        >>> o.sum().backward()
        >>> k.grad.shape
        torch.Size([1, 200, 2, 64])
    """
    o, final_state = _chunk_simple_gla(
        *(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
    )
    return o, final_state if output_final_state else None


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one gate per head, token by token: decoding and short sequences.

    The recurrence, the arguments and the errors are those of `flaop.simple_gla`. Differentiable
    like `flaop.chunk_simple_gla`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV]; g_gamma: [HV]; one dtype for q, k and
            v, any floating dtype for the gates, which are natural logarithms, <= 0.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first: as in
            `flaop.simple_gla`. chunk_size and split_size are checked and change nothing.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.simple_gla`.

    Cost: one kernel, its time proportional to the longest sequence. Keeps its inputs only.

    Reference: RetNet, arXiv:2307.08621, and Mamba-2, arXiv:2405.21060.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(8, 1, 2, 64) for _ in range(3))
        >>> state = torch.zeros(8, 2, 64, 64)
        >>> o, state = flaop.fused_recurrent_simple_gla(
        ...     q, k, v, -torch.rand(8, 1, 2), initial_state=state, output_final_state=True)
        >>> o.shape
        torch.Size([8, 1, 2, 64])
    """
    o, final_state = _fused_recurrent_simple_gla(
        *(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
    )
    return o, final_state if output_final_state else None


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    backend: str | None = None,
    gv: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, one gate per key channel, by whichever path suits the call.

    Per sequence and value head, over a state S of shape [K, V], with the query and key head
    `i // (HV / H)` for value head i:

        S <- Diag(exp(g_t)) S Diag(exp(gv_t))
        S <- S + k_t v_t^T
        o_t = scale * S^T q_t

    Short calls without a gradient (T <= 64; packed: T <= 64 N and T <= 1024) run token by token in
    one kernel (`fused_recurrent_gla`), everything else in chunks (`chunk_gla`). With gv every call
    runs token by token: the chunk path has no such gate. `flaop.explain` says which path a call
    takes, `flaop.backend` forces one.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU); any K.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q; HV is a multiple of H; any V.
        g: log decay (natural logarithm, <= 0) [B, T, HV, K], any floating dtype; -inf empties the
            channel.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size, backend: as in `flaop.simple_gla`.
        gv: log decay of the value channels (<= 0) [B, T, HV, V], any floating dtype; None: none.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError: a shape, device or value breaks the above, or the forced path cannot serve it.
        TypeError: a dtype does.
        NotImplementedError: double backward.

    Cost: as the path it takes; choosing reads shapes and flags only, never a value.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> g = F.logsigmoid(torch.randn(1, 100, 2, 64)) / 16
        >>> o, state = flaop.gla(q, k, v, g, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    o, final_state = _gla(
        *(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
        _paths.BACKEND if backend is None else backend,
        gv,
    )
    return o, final_state if output_final_state else None


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention in chunks: parallel over time within a chunk.

    The recurrence, the arguments and the errors are those of `flaop.gla`, without gv.
    Differentiable in q, k, v, g and initial_state, through o and through the final state. One
    opaque operator in compiled graphs: `flaop::chunk_gla` without a gradient,
    `flaop::chunk_gla_fwd` with one (the name to list in a selective-checkpoint policy).

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K]; one dtype for q, k and v, any
            floating dtype for g, a natural logarithm, <= 0.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size: as in `flaop.simple_gla`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.gla`.

    Cost: the forward keeps one [B, T, HV, 64] matrix in the dtype of q beside its inputs; the
    backward computes the states of the chunks again, as in `flaop.chunk_simple_gla`.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, k, v = (torch.randn(1, 200, 2, 64) for _ in range(3))
        >>> x = torch.randn(1, 200, 2, 64, requires_grad=True)
        >>> o, _ = flaop.chunk_gla(q, k, v, F.logsigmoid(x))
        >>> o.sum().backward()
        >>> x.grad.shape
        torch.Size([1, 200, 2, 64])
    """
    o, final_state = _chunk_gla(
        *(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
    )
    return o, final_state if output_final_state else None


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    gv: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention token by token: decoding, short sequences, gates on value channels.

    The recurrence, the arguments and the errors are those of `flaop.gla`. Differentiable in q, k,
    v, g, gv and initial_state, through o and through the final state.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K]; gv: [B, T, HV, V]; one dtype for q,
            k and v, any floating dtype for the gates, which are natural logarithms, <= 0.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first: as in
            `flaop.simple_gla`. chunk_size and split_size are checked and change nothing.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.gla`.

    Cost: one kernel, its time proportional to the longest sequence. Keeps its inputs only.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(8, 1, 2, 64) for _ in range(3))
        >>> state = torch.zeros(8, 2, 64, 64)
        >>> o, state = flaop.fused_recurrent_gla(
        ...     q, k, v, -torch.rand(8, 1, 2, 64), initial_state=state, output_final_state=True)
        >>> o.shape
        torch.Size([8, 1, 2, 64])
    """
    o, final_state = _fused_recurrent_gla(
        *(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size, gv),
    )
    return o, final_state if output_final_state else None
