"""The documented functions of linear attention without a gate, composites around simple_gla."""

import torch
from torch import Tensor

from flaop import _paths

_linear_attn = torch.ops.flaop.linear_attn.default
_chunk_linear_attn = torch.ops.flaop.chunk_linear_attn.default
_fused_recurrent_linear_attn = torch.ops.flaop.fused_recurrent_linear_attn.default


def linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    backend: str | None = None,
    normalize: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention without a gate.

    The recurrence of `flaop.simple_gla` without a gate. With normalize the output is divided by
    scale * q_t . z_t + 1e-10, where z_t is the sum of the keys up to t: weights of the values that
    sum to one if q and k are positive features. z is the last column of the state, [N, HV, K, V +
    1], so that a sequence may be run in pieces. Paths are chosen as in `flaop.simple_gla`;
    `flaop.explain` says which, `flaop.backend` forces one.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU); any K.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q; HV is a multiple of H; any V.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size, backend: as in `flaop.simple_gla`.
        normalize: divide by the sum of the weights. State in and out are then [N, HV, K, V + 1], or
            [N, HV, V + 1, K] with state_v_first.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError: a shape, device or value breaks the above, or the forced path cannot serve it.
        TypeError: a dtype does.
        NotImplementedError: double backward.

    Cost: as `flaop.simple_gla`; with normalize a copy of v with one more channel, and of o.

    Reference: Transformers are RNNs, arXiv:2006.16236.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.rand(1, 100, 2, 64) for _ in range(3))
        >>> o, _ = flaop.linear_attn(q, k, v, normalize=True)
        >>> o.shape
        torch.Size([1, 100, 2, 64])
    """
    o, final_state = _linear_attn(
        *(q, k, v, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
        _paths.BACKEND if backend is None else backend,
        normalize,
    )
    return o, final_state if output_final_state else None


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    normalize: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention without a gate, in chunks.

    The recurrence, the arguments and the errors are those of `flaop.linear_attn`; the path is that
    of `flaop.chunk_simple_gla`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; one dtype.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size, normalize: as in `flaop.linear_attn`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.linear_attn`.

    Cost: as `flaop.chunk_simple_gla`.

    Reference: Transformers are RNNs, arXiv:2006.16236.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.rand(1, 100, 2, 64) for _ in range(3))
        >>> o, _ = flaop.chunk_linear_attn(q, k, v, normalize=True)
        >>> o.shape
        torch.Size([1, 100, 2, 64])
    """
    o, final_state = _chunk_linear_attn(
        *(q, k, v, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
        normalize,
    )
    return o, final_state if output_final_state else None


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    normalize: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention without a gate, token by token.

    The recurrence, the arguments and the errors are those of `flaop.linear_attn`; the path is that
    of `flaop.fused_recurrent_simple_gla`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; one dtype.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size, normalize: as in `flaop.linear_attn`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.linear_attn`.

    Cost: as `flaop.fused_recurrent_simple_gla`.

    Reference: Transformers are RNNs, arXiv:2006.16236.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.rand(1, 100, 2, 64) for _ in range(3))
        >>> o, _ = flaop.fused_recurrent_linear_attn(q, k, v, normalize=True)
        >>> o.shape
        torch.Size([1, 100, 2, 64])
    """
    o, final_state = _fused_recurrent_linear_attn(
        *(q, k, v, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
        normalize,
    )
    return o, final_state if output_final_state else None
