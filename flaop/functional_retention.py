"""The documented functions of retention and lightning attention, simple_gla with constant gates.

Composites: compiled graphs hold the arithmetic of the gate and the operator of simple_gla. A layer
that runs often keeps its gate in a buffer and calls `flaop.simple_gla`.
"""

import torch
from torch import Tensor

from flaop import _paths

_retention = torch.ops.flaop.retention.default
_chunk_retention = torch.ops.flaop.chunk_retention.default
_fused_recurrent_retention = torch.ops.flaop.fused_recurrent_retention.default
_lightning_attn = torch.ops.flaop.lightning_attn.default
_chunk_lightning_attn = torch.ops.flaop.chunk_lightning_attn.default
_fused_recurrent_lightning_attn = torch.ops.flaop.fused_recurrent_lightning_attn.default


def retention(
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
) -> tuple[Tensor, Tensor | None]:
    """Retention: linear attention that decays at a constant rate per head.

    The recurrence of `flaop.simple_gla` with g_gamma[h] = log1p(-2^(-5-h)) for value head h:
    factors 31/32, 63/64, ... a token. Paths are chosen as in `flaop.simple_gla`; `flaop.explain`
    says which, `flaop.backend` forces one.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU); any K.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q; HV is a multiple of H; any V.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size, backend: as in `flaop.simple_gla`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError: a shape, device or value breaks the above, or the forced path cannot serve it.
        TypeError: a dtype does.
        NotImplementedError: double backward.

    Cost: as `flaop.simple_gla`, and a few kernels over HV numbers for the gate.

    Reference: Retentive Network (RetNet), arXiv:2307.08621.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> o, _ = flaop.retention(q, k, v)
        >>> o.shape
        torch.Size([1, 100, 2, 64])
    """
    o, final_state = _retention(
        *(q, k, v, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
        _paths.BACKEND if backend is None else backend,
    )
    return o, final_state if output_final_state else None


def chunk_retention(
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
) -> tuple[Tensor, Tensor | None]:
    """Retention, in chunks.

    The recurrence, the arguments and the errors are those of `flaop.retention`; the path is that of
    `flaop.chunk_simple_gla`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; one dtype.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size: as in `flaop.retention`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.retention`.

    Cost: as `flaop.chunk_simple_gla`.

    Reference: Retentive Network (RetNet), arXiv:2307.08621.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> o, _ = flaop.chunk_retention(q, k, v)
        >>> o.shape
        torch.Size([1, 100, 2, 64])
    """
    o, final_state = _chunk_retention(
        *(q, k, v, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
    )
    return o, final_state if output_final_state else None


def fused_recurrent_retention(
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
) -> tuple[Tensor, Tensor | None]:
    """Retention, token by token.

    The recurrence, the arguments and the errors are those of `flaop.retention`; the path is that of
    `flaop.fused_recurrent_simple_gla`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; one dtype.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size: as in `flaop.retention`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.retention`.

    Cost: as `flaop.fused_recurrent_simple_gla`.

    Reference: Retentive Network (RetNet), arXiv:2307.08621.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> o, _ = flaop.fused_recurrent_retention(q, k, v)
        >>> o.shape
        torch.Size([1, 100, 2, 64])
    """
    o, final_state = _fused_recurrent_retention(
        *(q, k, v, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
    )
    return o, final_state if output_final_state else None


def lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
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
    """Lightning attention: a constant decay per head and layer.

    The recurrence of `flaop.simple_gla` with g_gamma[h] = -(8 / HV) (1 - layer_idx / num_layers) h
    for value head h. Paths are chosen as in `flaop.simple_gla`; `flaop.explain` says which,
    `flaop.backend` forces one.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU); any K.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q; HV is a multiple of H; any V.
        layer_idx: index of the layer, in [0, num_layers).
        num_layers: number of layers of the model.
        scale, initial_state, output_final_state, cu_seqlens, state_v_first, chunk_size,
        split_size, backend: as in `flaop.simple_gla`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError: a shape, device or value breaks the above, or the forced path cannot serve it.
        TypeError: a dtype does.
        NotImplementedError: double backward.

    Cost: as `flaop.simple_gla`, and a few kernels over HV numbers for the gate.

    Reference: Lightning Attention-2, arXiv:2401.04658.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> o, _ = flaop.lightning_attn(q, k, v, 3, 12)
        >>> o.shape
        torch.Size([1, 100, 2, 64])
    """
    o, final_state = _lightning_attn(
        *(q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
        _paths.BACKEND if backend is None else backend,
    )
    return o, final_state if output_final_state else None


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention, in chunks.

    The recurrence, the arguments and the errors are those of `flaop.lightning_attn`; the path is
    that of `flaop.chunk_simple_gla`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; one dtype.
        layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens, state_v_first,
        chunk_size, split_size: as in `flaop.lightning_attn`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.lightning_attn`.

    Cost: as `flaop.chunk_simple_gla`.

    Reference: Lightning Attention-2, arXiv:2401.04658.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> o, _ = flaop.chunk_lightning_attn(q, k, v, 3, 12)
        >>> o.shape
        torch.Size([1, 100, 2, 64])
    """
    o, final_state = _chunk_lightning_attn(
        *(q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
    )
    return o, final_state if output_final_state else None


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention, token by token.

    The recurrence, the arguments and the errors are those of `flaop.lightning_attn`; the path is
    that of `flaop.fused_recurrent_simple_gla`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; one dtype.
        layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens, state_v_first,
        chunk_size, split_size: as in `flaop.lightning_attn`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.lightning_attn`.

    Cost: as `flaop.fused_recurrent_simple_gla`.

    Reference: Lightning Attention-2, arXiv:2401.04658.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> o, _ = flaop.fused_recurrent_lightning_attn(q, k, v, 3, 12)
        >>> o.shape
        torch.Size([1, 100, 2, 64])
    """
    o, final_state = _fused_recurrent_lightning_attn(
        *(q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size),
    )
    return o, final_state if output_final_state else None
