"""The documented functions of the gated delta rule on a pool of states. Each calls one operator."""

import torch
from torch import Tensor

_gated_delta_rule_step_ = torch.ops.flaop.gated_delta_rule_step_.default
_chunk_gated_delta_rule_pool_ = torch.ops.flaop.chunk_gated_delta_rule_pool_.default
_gated_delta_rule_verify = torch.ops.flaop.gated_delta_rule_verify.default
_gated_delta_rule_commit_ = torch.ops.flaop.gated_delta_rule_commit_.default


def gated_delta_rule_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
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
    state_v_first: bool = False,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:
    """Decode on a pool of states by the gated delta rule: one to eight tokens, in place.

    Per sequence and value head, over a state S of shape [K, V] taken from a slot of the pool:

        S <- exp(g_t) S
        u_t = beta_t (v_t - S^T k_t)
        S <- S + k_t u_t^T
        o_t = scale * S^T q_t
        S <- S rounded to the dtype of the pool

    Rows, padding, the pool, its slots and what else is not named here are those of
    `flaop.kda_step_`. There is no gradient.

    Args:
        q, k, v, beta: as of `flaop.kda_step_`.
        g: log decay (natural logarithm, <= 0) [B, T, HV], any floating dtype; -inf empties the
            state. None: no decay, the delta rule. With use_gate_in_kernel the raw gate x.
        A_log: logarithm of the gate's factor [HV], any floating dtype; needed with
            use_gate_in_kernel.
        dt_bias: bias of the raw gate [HV], any floating dtype. None means zeros.
        use_gate_in_kernel: compute the log decay from x = g: -exp(A_log) softplus(x + dt_bias).
        state: the pool, as of `flaop.kda_step_`. Changed in place.
        state_indices: the slots [N] or [N, S], int32, as of `flaop.kda_step_`.

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads and writes each state once (with [N, S], writes it T times).

    Reference: Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.
    """
    return _gated_delta_rule_step_(
        *(q, k, v, g, beta, state, state_indices, scale, cu_seqlens, A_log, dt_bias),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel),
        *(allow_neg_eigval, state_v_first, write_indices, has_initial_state),
        *(num_accepted_tokens,),
    )


def chunk_gated_delta_rule_pool_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
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
    state_v_first: bool = False,
    chunk_size: int = 64,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_interval: int = 0,
    checkpoint_indices: Tensor | None = None,
) -> Tensor:
    """Prefill into a pool of states by the gated delta rule in chunks of 64 tokens.

    As `flaop.chunk_gated_delta_rule` from the states in the slots, which become the
    states after the last tokens, rounded once to the dtype of the pool. Slots and checkpoints, and
    what else is not named here, are those of `flaop.chunk_kda_pool_`. There is no gradient.

    Args:
        q, k, v, g, beta: as of `flaop.gated_delta_rule_step_`, of any length T.
        state: the pool, as of `flaop.kda_step_`. Changed in place.
        state_indices: the slot of each sequence [N], int32.

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: that of `flaop.chunk_gated_delta_rule` and two passes over the states of the call, fp32.

    Reference: Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.
    """
    return _chunk_gated_delta_rule_pool_(
        *(q, k, v, g, beta, state, state_indices, scale, cu_seqlens, A_log, dt_bias),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel),
        *(allow_neg_eigval, state_v_first, chunk_size, write_indices, has_initial_state),
        *(checkpoint_interval, checkpoint_indices),
    )


def gated_delta_rule_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
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
    state_v_first: bool = False,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `flaop.gated_delta_rule_step_` would return for draft tokens; the pool stays as it is.

    The other results say what the tokens would write: `flaop.gated_delta_rule_commit_` applies
    those that were accepted. Arguments are those of `flaop.gated_delta_rule_step_` with one slot
    per sequence, state_indices [N]. There is no gradient.

    Returns:
        o [B, T, HV, V] in the dtype of v, and in float32 (float64 for float64 inputs): the keys as
        they are written, k [B, T, H, K]; what is written, u [B, T, HV, V]; the log decay that was
        applied, g [B, T, HV], or [0] without a gate. Tokens of no sequence and padding rows
        have zeros.

    Raises:
        ValueError: a shape, device or value breaks the contract of the step.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads each state once.

    Reference: Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.
    """
    return _gated_delta_rule_verify(
        *(q, k, v, g, beta, state, state_indices, scale, cu_seqlens, A_log, dt_bias),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel),
        *(allow_neg_eigval, state_v_first, has_initial_state),
    )


def gated_delta_rule_commit_(
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
    """Writes the accepted ones of the tokens of `flaop.gated_delta_rule_verify` into the pool.

        S <- exp(g_t) S + k_t u_t^T, rounded to the dtype of the pool    for t < accepted

    Args:
        state: the pool that was verified on. Changed in place.
        state_indices: the slot of each sequence [N], int32; padding as of `flaop.kda_step_`.
        num_accepted_tokens: how many tokens to write [N], int32; at most those that exist.
        k, u, g: as `flaop.gated_delta_rule_verify` returned them, float32 (float64 on the CPU).
        state_v_first, cu_seqlens, has_initial_state: as given to `flaop.gated_delta_rule_verify`.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads and writes each state once.

    Reference: Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.
    """
    _gated_delta_rule_commit_(
        *(state, state_indices, num_accepted_tokens, k, u, g),
        *(state_v_first, cu_seqlens, has_initial_state),
    )
