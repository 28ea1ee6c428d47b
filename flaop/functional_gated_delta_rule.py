"""The documented functions of the gated delta rule. Each calls one operator."""

import torch
from torch import Tensor

from flaop import _paths

_gated_delta_rule = torch.ops.flaop.gated_delta_rule.default
_chunk_gated_delta_rule = torch.ops.flaop.chunk_gated_delta_rule.default
_fused_recurrent_gated_delta_rule = torch.ops.flaop.fused_recurrent_gated_delta_rule.default


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
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
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta networks (GDN), by whichever path suits the call. Also called `flaop.gdn`.

    Per sequence and value head, over a state S of shape [K, V], with the query and key head
    `i // (HV / H)` for value head i:

        S <- exp(g_t) S
        u_t = beta_t (v_t - S^T k_t)
        S <- S + k_t u_t^T
        o_t = scale * S^T q_t

    Short calls without a gradient (T <= 64; packed: T <= 64 N and T <= 1024) run token by token in
    one kernel (`fused_recurrent_gated_delta_rule`), everything else in chunks
    (`chunk_gated_delta_rule`). `flaop.explain` says which path a call takes, `flaop.backend` forces
    one. Under torch.compile the choice is a guard on T: one graph per side of the threshold.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16 or float16 (float64 on the CPU). K <= 256.
        k: keys [B, T, H, K], dtype of q. With beta |k|^2 > 2 the state grows from token to token.
        v: values [B, T, HV, V], dtype of q; HV is a multiple of H.
        g: log decay (natural logarithm, <= 0) [B, T, HV], any floating dtype; -inf empties the
            state. None: no decay, the delta rule. With use_gate_in_kernel the raw gate x.
        beta: write strength [B, T, HV], any floating dtype; its logit with
            use_beta_sigmoid_in_kernel.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32, bfloat16 or
            float16. N is B, or the number of packed sequences. None means zeros.
        output_final_state: return the state after the last token.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64, on the device of q, not
            decreasing; needs B = 1. Tokens outside them have zero outputs.
        A_log: logarithm of the gate's factor [HV], any floating dtype; needed with
            use_gate_in_kernel.
        dt_bias: bias of the raw gate [HV], any floating dtype. None means zeros.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum(x^2) + 1e-6) first.
        use_gate_in_kernel: compute the log decay from x = g: -exp(A_log) softplus(x + dt_bias).
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

    Reference: Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, v = (torch.randn(1, 100, 2, 64) for _ in range(2))
        >>> k = F.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> g, beta = F.logsigmoid(torch.randn(1, 100, 2)), torch.rand(1, 100, 2)
        >>> o, state = flaop.gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    o, final_state = _gated_delta_rule(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first),
        *(chunk_size, split_size, disable_recompute),
        _paths.BACKEND if backend is None else backend,
    )
    return o, final_state if output_final_state else None


gdn = gated_delta_rule


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
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
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta networks in chunks of 64 tokens: parallel over time within a chunk.

    The recurrence, the arguments and the errors are those of `flaop.gated_delta_rule`, which
    chooses between this function and `flaop.fused_recurrent_gated_delta_rule`. Differentiable in q,
    k, v, g, beta, A_log, dt_bias and initial_state, through o and through the final state. One
    opaque operator in compiled graphs: `flaop::chunk_gated_delta_rule` without a gradient,
    `flaop::chunk_gated_delta_rule_fwd` with one (the name to list in a selective-checkpoint
    policy).

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV] or None; beta: [B, T, HV]; one dtype for
            q, k and v, any floating dtype for g and beta. g is a natural logarithm, <= 0.
        scale, initial_state, output_final_state, cu_seqlens, A_log, dt_bias,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, chunk_size, split_size, disable_recompute: as in `flaop.gated_delta_rule`.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.gated_delta_rule`.

    Cost: without a gradient no chunk state is written: extra memory is two [B, T, HV, 64] matrices
    in the dtype of q and a few numbers for each token and head. With one, the two matrices are kept
    beside the inputs, and the backward recomputes the rest.

    Reference: Gated Delta Networks, arXiv:2412.06464.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(1, 200, 2, 64, requires_grad=True) for _ in range(3))
        >>> x, beta = torch.randn(1, 200, 2, requires_grad=True), torch.randn(1, 200, 2)
        >>> o, _ = flaop.chunk_gated_delta_rule(
        ...     q, k, v, x, beta, A_log=torch.zeros(2), use_gate_in_kernel=True,
        ...     use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        >>> o.sum().backward()
        >>> x.grad.shape
        torch.Size([1, 200, 2])
    """
    o, final_state = _chunk_gated_delta_rule(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first),
        *(chunk_size, split_size, disable_recompute),
    )
    return o, final_state if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
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
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta networks token by token: decoding, and short or many small sequences.

    The recurrence, the arguments and the errors are those of `flaop.gated_delta_rule`.
    Differentiable like `flaop.chunk_gated_delta_rule`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV] or None; beta: [B, T, HV]; one dtype for
            q, k and v, any floating dtype for g and beta. g is a natural logarithm, <= 0.
        scale, initial_state, output_final_state, cu_seqlens, A_log, dt_bias,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first: as in `flaop.gated_delta_rule`.
        chunk_size, split_size, disable_recompute: checked, and without effect.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 ([N, HV, V,
        K] with state_v_first), or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flaop.gated_delta_rule`.

    Cost: one kernel, its time proportional to the longest sequence. With a gradient it also keeps
    u [B, T, HV, V] in float32.

    Reference: Gated Delta Networks, arXiv:2412.06464.

    Example:
        >>> import torch, flaop
        >>> q, k, v = (torch.randn(8, 1, 2, 64) for _ in range(3))
        >>> g, beta, state = -torch.rand(8, 1, 2), torch.rand(8, 1, 2), torch.zeros(8, 2, 64, 64)
        >>> o, state = flaop.fused_recurrent_gated_delta_rule(
        ...     q, k, v, g, beta, initial_state=state, output_final_state=True,
        ...     use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([8, 1, 2, 64])
    """
    o, final_state = _fused_recurrent_gated_delta_rule(
        *(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first),
        *(chunk_size, split_size, disable_recompute),
    )
    return o, final_state if output_final_state else None
