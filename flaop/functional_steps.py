"""The documented functions of KDA on a pool of states. Each calls one operator."""

import torch
from torch import Tensor

_kda_step_ = torch.ops.flaop.kda_step_.default
_chunk_kda_pool_ = torch.ops.flaop.chunk_kda_pool_.default
_kda_verify = torch.ops.flaop.kda_verify.default
_kda_commit_ = torch.ops.flaop.kda_commit_.default


def kda_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:
    """Decode on a pool of states by KDA: one to eight tokens per sequence, in place, one kernel.

    Per sequence and value head, over a state S of shape [K, V] taken from a slot of the pool, with
    the query and key head `i // (HV / H)` for value head i:

        S <- Diag(exp(g_t)) S
        u_t = beta_t (v_t - S^T k_t)
        S <- S + k_t u_t^T
        o_t = scale * S^T q_t
        S <- S rounded to the dtype of the pool

    so that one call of S tokens equals S calls. A row is a sequence of the call; it is padding if
    the slot that it reads is negative or not in the pool: nothing is read or written for it, and
    its outputs are zero. A slot that is not in the pool is never written. Two rows that write one
    slot leave it undefined (an error under FLAOP_DEBUG=1). There is no gradient.

    Args:
        q: queries [B, T, H, K], T <= 8; float32, bfloat16 or float16 (float64 on the CPU).
            K <= 256. q, k, v, g and beta may be strided views of one packed projection.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q; HV is a multiple of H.
        g: log decay (natural logarithm, <= 0) [B, T, HV, K], any floating dtype; -inf empties the
            channel. With use_gate_in_kernel the raw gate x.
        beta: write strength [B, T, HV], any floating dtype; its logit with
            use_beta_sigmoid_in_kernel.
        state: the pool [slots, HV, K, V], or [slots, HV, V, K] with state_v_first; float32,
            bfloat16 or float16. Slots are contiguous and may lie anywhere (a view of a larger
            cache). Changed in place.
        state_indices: the slots, int32. [N]: the slot of each sequence, N is B or the number of
            packed sequences. [N, S] with S >= T: a slot per token, for speculative decoding: the
            state after token t goes to column t.
        scale: factor on the output; None means K ** -0.5.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64, on the device of q, not
            decreasing; needs B = 1. Tokens outside them, and of a sequence those beyond S, have
            zero outputs.
        A_log: logarithm of the gate's factor [HV], any floating dtype; needed with
            use_gate_in_kernel unless lower_bound is given.
        dt_bias: bias of the raw gate [HV, K] or [HV * K], any floating dtype. None means zeros.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum(x^2) + 1e-6) first.
        use_gate_in_kernel: compute the log decay from x = g: -exp(A_log) softplus(x + dt_bias),
            or with lower_bound: lower_bound * sigmoid(exp(A_log) (x + dt_bias)).
        use_beta_sigmoid_in_kernel: apply the sigmoid to beta first.
        allow_neg_eigval: double that sigmoid, so that transitions may have eigenvalues down to -1.
        lower_bound: <= 0; the bounded gate of use_gate_in_kernel.
        state_v_first: states are [slots, HV, V, K].
        write_indices: where states go, int32, shaped as state_indices; None means state_indices.
            One that is not in the pool: the state is not kept, the outputs are computed.
        has_initial_state: [N], bool; False starts from zeros, whatever the slot holds. None means
            True. The slot must be in the pool all the same.
        num_accepted_tokens: [N], int32, with state_indices [N, S]: how many tokens of the last
            call were accepted; the state of column max(num_accepted_tokens, 1) - 1 is read.
            More than S makes the row padding. None means column 0.

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads and writes each state once (with [N, S], writes it T times). No
    copy, no host read: it can be captured in a CUDA graph after one call.

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, k, v = (F.normalize(torch.randn(2, 1, 2, 64), dim=-1) for _ in range(3))
        >>> g, beta = F.logsigmoid(torch.randn(2, 1, 2, 64)), torch.rand(2, 1, 2)
        >>> pool = torch.zeros(8, 2, 64, 64)
        >>> slots = torch.tensor([5, 3], dtype=torch.int32)
        >>> flaop.kda_step_(q, k, v, g, beta, pool, slots).shape
        torch.Size([2, 1, 2, 64])
        >>> pool.flatten(1).any(1).nonzero().flatten()
        tensor([3, 5])
    """
    return _kda_step_(
        *(q, k, v, g, beta, state, state_indices, scale, cu_seqlens, A_log, dt_bias),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel),
        *(allow_neg_eigval, lower_bound, state_v_first, write_indices, has_initial_state),
        *(num_accepted_tokens,),
    )


def chunk_kda_pool_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
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
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_interval: int = 0,
    checkpoint_indices: Tensor | None = None,
) -> Tensor:
    """Prefill into a pool of states by KDA in chunks of 64 tokens.

    As `flaop.chunk_kda` from the states in the slots, which become the states after the last
    tokens, rounded once to the dtype of the pool. With checkpoint_interval the states in between
    are kept too, for prefix caching. Rows, padding, slots and what else is not named here are those
    of `flaop.kda_step_`; of a padding row all outputs are zero. There is no gradient.

    Args:
        q, k, v, g, beta: as of `flaop.kda_step_`, of any length T.
        state: the pool, as of `flaop.kda_step_`. Changed in place.
        state_indices: the slot of each sequence [N], int32.
        safe_gate: promises that the log decay is in [-5, 0], which allows faster products; with
            use_gate_in_kernel it needs lower_bound in [-5, 0). A hint.
        chunk_size: 16, 32 or 64: a hint.
        write_indices: where the last states go [N], int32; None means state_indices.
        checkpoint_interval: 0, or a positive multiple of 64: also keep the state every so many
            tokens of a sequence.
        checkpoint_indices: where to, [N, M], int32, M >= T // checkpoint_interval: column j is
            the slot of the state after (j + 1) * checkpoint_interval tokens. A slot that is not in
            the pool, and one of a sequence that has fewer tokens, is not written.

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: that of `flaop.chunk_kda` and two passes over the states of the call, fp32.

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.
    """
    return _chunk_kda_pool_(
        *(q, k, v, g, beta, state, state_indices, scale, cu_seqlens, A_log, dt_bias),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel),
        *(allow_neg_eigval, safe_gate, lower_bound, state_v_first, chunk_size),
        *(write_indices, has_initial_state, checkpoint_interval, checkpoint_indices),
    )


def kda_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `flaop.kda_step_` would return for draft tokens, on a pool that stays as it is.

    The other results say what the tokens would write: `flaop.kda_commit_` applies those that were
    accepted. Arguments are those of `flaop.kda_step_` with one slot per sequence, state_indices
    [N]. There is no gradient.

    Returns:
        o [B, T, HV, V] in the dtype of v, and in float32 (float64 for float64 inputs): the keys as
        they are written, k [B, T, H, K]; what is written, u [B, T, HV, V]; the log decay that was
        applied, g [B, T, HV, K]. Tokens of no sequence and padding rows have zeros.

    Raises:
        ValueError: a shape, device or value breaks the contract of `flaop.kda_step_`.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads each state once.

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Example:
        >>> import torch, torch.nn.functional as F, flaop
        >>> q, k, v = (F.normalize(torch.randn(2, 4, 2, 64), dim=-1) for _ in range(3))
        >>> g, beta = F.logsigmoid(torch.randn(2, 4, 2, 64)), torch.rand(2, 4, 2)
        >>> pool = torch.zeros(8, 2, 64, 64)
        >>> slots, accepted = torch.tensor([[5, 3], [4, 0]], dtype=torch.int32)
        >>> o, *written = flaop.kda_verify(q, k, v, g, beta, pool, slots)
        >>> flaop.kda_commit_(pool, slots, accepted, *written)
        >>> pool.flatten(1).any(1).nonzero().flatten()
        tensor([5])
    """
    return _kda_verify(
        *(q, k, v, g, beta, state, state_indices, scale, cu_seqlens, A_log, dt_bias),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel),
        *(allow_neg_eigval, lower_bound, state_v_first, has_initial_state),
    )


def kda_commit_(
    state: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor,
    *,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> None:
    """Writes the accepted ones of the tokens of `flaop.kda_verify` into the pool.

        S <- Diag(exp(g_t)) S + k_t u_t^T, rounded to the dtype of the pool    for t < accepted

    Args:
        state: the pool that was verified on. Changed in place.
        state_indices: the slot of each sequence [N], int32; padding as of `flaop.kda_step_`.
        num_accepted_tokens: how many tokens to write [N], int32; at most those that exist.
        k, u, g: as `flaop.kda_verify` returned them, float32 (float64 on the CPU).
        state_v_first, cu_seqlens, has_initial_state: as given to `flaop.kda_verify`.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads and writes each state once.

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.
    """
    _kda_commit_(
        *(state, state_indices, num_accepted_tokens, k, u, g),
        *(state_v_first, cu_seqlens, has_initial_state),
    )
