"""The documented functions. Each calls one operator of torch.ops.flaop."""

import torch
from torch import Tensor

from flaop import _paths

# Looked up once: the attribute chain costs as much as the call.
_kda = torch.ops.flaop.kda.default
_chunk_kda = torch.ops.flaop.chunk_kda.default
_fused_recurrent_kda = torch.ops.flaop.fused_recurrent_kda.default
_flash_kda_fwd = torch.ops.flaop.flash_kda_fwd.default


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, by whichever path suits the call.

    Per sequence and value head, over a state S of shape [K, V], with the query and key head
    `i // (HV / H)` for value head i:

        S <- Diag(exp(g_t)) S
        u_t = beta_t (v_t - S^T k_t)
        S <- S + k_t u_t^T
        o_t = scale * S^T q_t

    Short calls without a gradient (T <= 64; packed: T <= 64 N and T <= 1024) run token by token in
    one kernel (`fused_recurrent_kda`), everything else in chunks (`chunk_kda`). `flaop.explain`
    says which path a call takes, `flaop.backend` forces one. Under torch.compile the choice is a
    guard on T: one graph per side of the threshold.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU). K <= 256.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q; HV is a multiple of H.
        g: log decay (natural logarithm, <= 0) [B, T, HV, K], any floating dtype; -inf empties the
            state. With use_gate_in_kernel the raw gate x.
        beta: write strength [B, T, HV], any floating dtype; its logit with
            use_beta_sigmoid_in_kernel.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32, bfloat16 or
            float16. N is B, or the number of packed sequences. None means zeros.
        output_final_state: return the state after the last token.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64, on the device of q, not
            decreasing; needs B = 1. Tokens outside them have zero outputs.
        A_log: logarithm of the gate's factor [HV], any floating dtype.
        dt_bias: bias of the raw gate [HV, K] or [HV * K], any floating dtype.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum(x^2) + 1e-6) first.
        use_gate_in_kernel: compute the log decay from x = g: -exp(A_log) softplus(x + dt_bias), or
            with lower_bound: lower_bound * sigmoid(exp(A_log) (x + dt_bias)).
        use_beta_sigmoid_in_kernel: apply the sigmoid to beta first.
        allow_neg_eigval: double that sigmoid, so that transitions may have eigenvalues down to -1.
        safe_gate: promise that the log decay is in [-5, 0], which allows faster products. With
            use_gate_in_kernel it needs lower_bound in [-5, 0).
        lower_bound: lowest log decay of the bounded gate, <= 0; needs use_gate_in_kernel.
        state_v_first: states are [N, HV, V, K].
        chunk_size: 16, 32 or 64: a hint.
        split_size: 0, or a multiple of chunk_size: keep chunk states only that often, a hint.
        disable_recompute: keep intermediate results for the backward: time for memory, a hint.
        backend: "chunk", "fused_recurrent" or "flash_kda" forces a path for this call; None takes
            the setting of `flaop.backend`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64
        inputs), shaped as initial_state, or None.

    Raises:
        ValueError: a shape, device or value breaks the above, or the forced path cannot serve it.
        TypeError: a dtype does.
        NotImplementedError: double backward.

    Cost: as the path it takes; choosing reads shapes and flags only, never a value.

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, v = (torch.randn(1, 100, 2, 64) for _ in range(2))
        >>> k = F.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> g, beta = F.logsigmoid(torch.randn(1, 100, 2, 64)), torch.rand(1, 100, 2)
        >>> o, state = flaop.kda(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    o, final_state = _kda(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, state_v_first),
        *(chunk_size, split_size, disable_recompute),
        _paths.BACKEND if backend is None else backend,
    )
    return o, final_state if output_final_state else None


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention in chunks of 64 tokens: parallel over time within a chunk.

    The recurrence, the arguments and the errors are those of `flaop.kda`, which chooses between
    this function and others. Differentiable in q, k, v, g, beta, A_log, dt_bias and
    initial_state, through o and through the final state. One opaque operator in compiled graphs:
    `flaop::chunk_kda` without a gradient, `flaop::chunk_kda_fwd` with one (the name to list in a
    selective-checkpoint policy).

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K]; beta: [B, T, HV]; one dtype for
            q, k and v, any floating dtype for g and beta. g is a natural logarithm, <= 0.
        scale, initial_state, output_final_state, cu_seqlens, A_log, dt_bias,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        safe_gate, lower_bound, state_v_first, chunk_size, split_size, disable_recompute: as in
            `flaop.kda`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.kda`.

    Cost: without a gradient no chunk state is written: extra memory is a few tensors of the size
    of q and g. With one, two [B, T, HV, 64] matrices in the dtype of q are kept beside the inputs,
    and the backward recomputes the rest.

    Reference: Kimi Linear, arXiv:2510.26692.

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, v, x = (torch.randn(1, 200, 2, 64, requires_grad=True) for _ in range(3))
        >>> k, beta = torch.randn(1, 200, 2, 64), torch.randn(1, 200, 2)
        >>> o, _ = flaop.chunk_kda(
        ...     q, k, v, x, beta, A_log=torch.zeros(2), use_gate_in_kernel=True,
        ...     use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        >>> o.sum().backward()
        >>> x.grad.shape
        torch.Size([1, 200, 2, 64])
    """
    o, final_state = _chunk_kda(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, state_v_first),
        *(chunk_size, split_size, disable_recompute),
    )
    return o, final_state if output_final_state else None


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token: decoding, and short or many small sequences.

    The recurrence, the arguments and the errors are those of `flaop.kda`. Differentiable like
    `flaop.chunk_kda`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K]; beta: [B, T, HV]; one dtype for
            q, k and v, any floating dtype for g and beta. g is a natural logarithm, <= 0.
        scale, initial_state, output_final_state, cu_seqlens, A_log, dt_bias,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        safe_gate, lower_bound, state_v_first: as in `flaop.kda`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.kda`.

    Cost: one kernel, its time proportional to the longest sequence. With a gradient it also keeps
    u [B, T, HV, V] in float32.

    Reference: Kimi Linear, arXiv:2510.26692.

    Example:
        >>> import torch, flaop
        >>> q, k, v, g = (torch.randn(8, 1, 2, 64) for _ in range(4))
        >>> state = torch.zeros(8, 2, 64, 64)
        >>> o, state = flaop.fused_recurrent_kda(
        ...     q, k, v, -g.abs(), torch.rand(8, 1, 2), initial_state=state,
        ...     output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([8, 1, 2, 64])
    """
    o, final_state = _fused_recurrent_kda(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, state_v_first),
    )
    return o, final_state if output_final_state else None


def flash_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    pieces: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention in one fused CUDA kernel, for inference under tight constraints.

    The recurrence and the arguments are those of `flaop.kda`, which chooses it where it serves.
    Part of builds with nvcc; runs on compute capability 9.0.

    Args:
        q, k, v, g: [B, T, H, 128] in bfloat16; beta: [B, T, H], any floating dtype.
        use_gate_in_kernel, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, safe_gate: must
            be True, with lower_bound in [-5, 0).
        state_v_first: must be True if a state goes in or out.
        scale, initial_state, output_final_state, cu_seqlens, A_log, dt_bias, allow_neg_eigval: as
            in `flaop.kda`.
        pieces: how many pieces of whole chunks of 64 tokens a sequence is cut into, which run side
            by side and are joined exactly; 0 chooses from shapes and the GPU.

    Returns:
        o [B, T, H, 128] in bfloat16, and the final state [N, H, 128, 128] in float32, or None.

    Raises:
        NotImplementedError: the kernel cannot serve the call, or a gradient is needed.
        ValueError, TypeError: as in `flaop.kda`.

    Cost: one kernel and no workspace in one piece; in P pieces three kernels, and 64 KiB for each
    of 2 P - 3 summaries of a sequence and head.

    Reference: Kimi Linear, arXiv:2510.26692.

    Example:
        >>> import flaop
        >>> flaop.supports("flash_kda", flaop.kda, q, k, v, g, beta)
        False
    """
    o, final_state = _flash_kda_fwd(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, state_v_first),
        pieces,
    )
    return o, final_state if output_final_state else None
