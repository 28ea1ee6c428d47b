"""The documented functions of the delta rule. Each calls one operator."""

import torch
from torch import Tensor

from flaop import _paths

_delta_rule = torch.ops.flaop.delta_rule.default
_chunk_delta_rule = torch.ops.flaop.chunk_delta_rule.default
_fused_recurrent_delta_rule = torch.ops.flaop.fused_recurrent_delta_rule.default


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule, `flaop.gated_delta_rule` without a gate, by whichever path suits the call.

    Per sequence and value head, over a state S of shape [K, V], with the query and key head
    `i // (HV / H)` for value head i:

        u_t = beta_t (v_t - S^T k_t)
        S <- S + k_t u_t^T
        o_t = scale * S^T q_t

    The path is chosen as in `flaop.gated_delta_rule`.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU). K <= 256.
        k: keys [B, T, H, K], dtype of q. With beta |k|^2 > 2 the state grows from token to token.
        v: values [B, T, HV, V], dtype of q; HV is a multiple of H.
        beta: write strength [B, T, HV], any floating dtype; its logit with
            use_beta_sigmoid_in_kernel.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32, bfloat16 or
            float16. N is B, or the number of packed sequences. None means zeros.
        output_final_state: return the state after the last token.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64, on the device of q, not
            decreasing; needs B = 1. Tokens outside them have zero outputs.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum(x^2) + 1e-6) first.
        use_beta_sigmoid_in_kernel: apply the sigmoid to beta first.
        allow_neg_eigval: double that sigmoid, so that transitions may have eigenvalues down to -1.
        state_v_first: states are [N, HV, V, K].
        chunk_size: 16, 32 or 64: a hint.
        split_size: 0, or a multiple of chunk_size: keep chunk states only that often, a hint.
        disable_recompute: keep intermediate results for the backward: time for memory, a hint.
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

    Reference: Parallelizing Linear Transformers with the Delta Rule over Sequence Length,
    arXiv:2406.06484.

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, v = (torch.randn(1, 100, 2, 64) for _ in range(2))
        >>> k = F.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> o, state = flaop.delta_rule(q, k, v, torch.rand(1, 100, 2), output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    o, final_state = _delta_rule(
        *(q, k, v, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        *(state_v_first, chunk_size, split_size, disable_recompute),
        _paths.BACKEND if backend is None else backend,
    )
    return o, final_state if output_final_state else None


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule in chunks of 64 tokens: `flaop.chunk_gated_delta_rule` without a gate.

    The recurrence, the arguments and the errors are those of `flaop.delta_rule`. Differentiable in
    q, k, v, beta and initial_state, through o and through the final state.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; beta: [B, T, HV]; one dtype for q, k and v, any
            floating dtype for beta.
        scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, chunk_size, split_size,
        disable_recompute: as in `flaop.delta_rule`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.delta_rule`.

    Cost: as `flaop.chunk_gated_delta_rule`.

    Reference: Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(1, 200, 2, 64, requires_grad=True) for _ in range(3))
        >>> o, _ = flaop.chunk_delta_rule(
        ...     q, k, v, torch.rand(1, 200, 2), use_qk_l2norm_in_kernel=True)
        >>> o.sum().backward()
        >>> k.grad.shape
        torch.Size([1, 200, 2, 64])
    """
    o, final_state = _chunk_delta_rule(
        *(q, k, v, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        *(state_v_first, chunk_size, split_size, disable_recompute),
    )
    return o, final_state if output_final_state else None


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule token by token: `flaop.fused_recurrent_gated_delta_rule` without a gate.

    The recurrence, the arguments and the errors are those of `flaop.delta_rule`. Differentiable
    like `flaop.chunk_delta_rule`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; beta: [B, T, HV]; one dtype for q, k and v, any
            floating dtype for beta.
        scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first: as in `flaop.delta_rule`.
        chunk_size, split_size, disable_recompute: checked, and without effect.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.delta_rule`.

    Cost: one kernel, its time proportional to the longest sequence. With a gradient it also keeps
    u [B, T, HV, V] in float32.

    Reference: Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(8, 1, 2, 64) for _ in range(3))
        >>> o, state = flaop.fused_recurrent_delta_rule(
        ...     q, k, v, torch.rand(8, 1, 2), initial_state=torch.zeros(8, 2, 64, 64),
        ...     output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([8, 1, 2, 64])
    """
    o, final_state = _fused_recurrent_delta_rule(
        *(q, k, v, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        *(state_v_first, chunk_size, split_size, disable_recompute),
    )
    return o, final_state if output_final_state else None
