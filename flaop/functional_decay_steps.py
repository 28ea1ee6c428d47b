"""The documented functions of the decay families on a pool of states. Each calls one operator."""

import torch
from torch import Tensor

_simple_gla_step_ = torch.ops.flaop.simple_gla_step_.default
_chunk_simple_gla_pool_ = torch.ops.flaop.chunk_simple_gla_pool_.default
_simple_gla_verify = torch.ops.flaop.simple_gla_verify.default
_simple_gla_commit_ = torch.ops.flaop.simple_gla_commit_.default
_gla_step_ = torch.ops.flaop.gla_step_.default
_chunk_gla_pool_ = torch.ops.flaop.chunk_gla_pool_.default
_gla_verify = torch.ops.flaop.gla_verify.default
_gla_commit_ = torch.ops.flaop.gla_commit_.default


def simple_gla_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:
    """Decode on a pool of states by simple gated linear attention: one to eight tokens, in place.

    Per sequence and value head, over a state S of shape [K, V] taken from a slot of the pool:

        S <- exp(g_t + g_gamma) S
        S <- S + k_t v_t^T
        o_t = scale * S^T q_t
        S <- S rounded to the dtype of the pool

    Rows, padding, the pool, its slots and what else is not named here are those of
    `flaop.kda_step_`. There is no gradient.

    Args:
        q, k, v: as of `flaop.kda_step_`, with any K.
        g: log decay (natural logarithm, <= 0) [B, T, HV], any floating dtype; -inf empties the
            state. None: none.
        g_gamma: a constant log decay per head [HV], any floating dtype, added to g. None: none.
        state: the pool, as of `flaop.kda_step_`. Changed in place.
        state_indices: the slots [N] or [N, S], int32, as of `flaop.kda_step_`.

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads and writes each state once (with [N, S], writes it T times).

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.
    """
    return _simple_gla_step_(
        *(q, k, v, g, g_gamma, state, state_indices, scale, cu_seqlens, state_v_first),
        *(write_indices, has_initial_state, num_accepted_tokens),
    )


def chunk_simple_gla_pool_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_interval: int = 0,
    checkpoint_indices: Tensor | None = None,
) -> Tensor:
    """Prefill into a pool of states by simple gated linear attention in chunks of 64 tokens.

    As `flaop.chunk_simple_gla` from the states in the slots, which become the
    states after the last tokens, rounded once to the dtype of the pool. Slots and checkpoints, and
    what else is not named here, are those of `flaop.chunk_kda_pool_`. There is no gradient.

    Args:
        q, k, v, g, g_gamma: as of `flaop.simple_gla_step_`, of any length T.
        state: the pool, as of `flaop.kda_step_`. Changed in place.
        state_indices: the slot of each sequence [N], int32.

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: that of `flaop.chunk_simple_gla` and two passes over the states of the call, fp32.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.
    """
    return _chunk_simple_gla_pool_(
        *(q, k, v, g, g_gamma, state, state_indices, scale, cu_seqlens, state_v_first),
        *(chunk_size, write_indices, has_initial_state, checkpoint_interval),
        *(checkpoint_indices,),
    )


def simple_gla_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `flaop.simple_gla_step_` would return for draft tokens; the pool stays as it is.

    The other results say what the tokens would write: `flaop.simple_gla_commit_` applies
    those that were accepted. Arguments are those of `flaop.simple_gla_step_` with one slot
    per sequence, state_indices [N]. There is no gradient.

    Returns:
        o [B, T, HV, V] in the dtype of v, and in float32 (float64 for float64 inputs): the keys as
        they are written, k [B, T, H, K]; the values, u [B, T, HV, V]; the log decay that was
        applied, g + g_gamma [B, T, HV], or [0] without a gate. Tokens of no sequence and padding
        rows have zeros.

    Raises:
        ValueError: a shape, device or value breaks the contract of the step.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads each state once.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.
    """
    return _simple_gla_verify(
        *(q, k, v, g, g_gamma, state, state_indices, scale, cu_seqlens, state_v_first),
        *(has_initial_state,),
    )


def simple_gla_commit_(
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
    """Writes the accepted ones of the tokens of `flaop.simple_gla_verify` into the pool.

        S <- exp(g_t) S + k_t u_t^T, rounded to the dtype of the pool    for t < accepted

    Args:
        state: the pool that was verified on. Changed in place.
        state_indices: the slot of each sequence [N], int32; padding as of `flaop.kda_step_`.
        num_accepted_tokens: how many tokens to write [N], int32; at most those that exist.
        k, u, g: as `flaop.simple_gla_verify` returned them, float32 (float64 on the CPU).
        state_v_first, cu_seqlens, has_initial_state: as given to `flaop.simple_gla_verify`.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads and writes each state once.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.
    """
    _simple_gla_commit_(
        *(state, state_indices, num_accepted_tokens, k, u, g),
        *(state_v_first, cu_seqlens, has_initial_state),
    )


def gla_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:
    """Decode on a pool of states by gated linear attention: one to eight tokens, in place.

    Per sequence and value head, over a state S of shape [K, V] taken from a slot of the pool:

        S <- Diag(exp(g_t)) S
        S <- S + k_t v_t^T
        o_t = scale * S^T q_t
        S <- S rounded to the dtype of the pool

    Rows, padding, the pool, its slots and what else is not named here are those of
    `flaop.kda_step_`. There is no gradient.

    Args:
        q, k, v: as of `flaop.kda_step_`, with any K.
        g: log decay (natural logarithm, <= 0) [B, T, HV, K], any floating dtype; -inf empties the
            channel.
        state: the pool, as of `flaop.kda_step_`. Changed in place.
        state_indices: the slots [N] or [N, S], int32, as of `flaop.kda_step_`.

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads and writes each state once (with [N, S], writes it T times).

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.
    """
    return _gla_step_(
        *(q, k, v, g, state, state_indices, scale, cu_seqlens, state_v_first),
        *(write_indices, has_initial_state, num_accepted_tokens),
    )


def chunk_gla_pool_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_interval: int = 0,
    checkpoint_indices: Tensor | None = None,
) -> Tensor:
    """Prefill into a pool of states by gated linear attention in chunks of 64 tokens.

    As `flaop.chunk_gla` from the states in the slots, which become the states after the last
    tokens, rounded once to the dtype of the pool. Slots and checkpoints, and what else is not named
    here, are those of `flaop.chunk_kda_pool_`. There is no gradient.

    Args:
        q, k, v, g: as of `flaop.gla_step_`, of any length T.
        state: the pool, as of `flaop.kda_step_`. Changed in place.
        state_indices: the slot of each sequence [N], int32.

    Returns:
        o [B, T, HV, V] in the dtype of v.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: that of `flaop.chunk_gla` and two passes over the states of the call, fp32.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.
    """
    return _chunk_gla_pool_(
        *(q, k, v, g, state, state_indices, scale, cu_seqlens, state_v_first, chunk_size),
        *(write_indices, has_initial_state, checkpoint_interval, checkpoint_indices),
    )


def gla_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `flaop.gla_step_` would return for draft tokens; the pool stays as it is.

    The other results say what the tokens would write: `flaop.gla_commit_` applies
    those that were accepted. Arguments are those of `flaop.gla_step_` with one slot
    per sequence, state_indices [N]. There is no gradient.

    Returns:
        o [B, T, HV, V] in the dtype of v, and in float32 (float64 for float64 inputs): the keys as
        they are written, k [B, T, H, K]; the values, u [B, T, HV, V]; the log decay that was
        applied, g [B, T, HV, K]. Tokens of no sequence and padding rows have zeros.

    Raises:
        ValueError: a shape, device or value breaks the contract of the step.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads each state once.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.
    """
    return _gla_verify(
        *(q, k, v, g, state, state_indices, scale, cu_seqlens, state_v_first),
        *(has_initial_state,),
    )


def gla_commit_(
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
    """Writes the accepted ones of the tokens of `flaop.gla_verify` into the pool.

        S <- Diag(exp(g_t)) S + k_t u_t^T, rounded to the dtype of the pool    for t < accepted

    Args:
        state: the pool that was verified on. Changed in place.
        state_indices: the slot of each sequence [N], int32; padding as of `flaop.kda_step_`.
        num_accepted_tokens: how many tokens to write [N], int32; at most those that exist.
        k, u, g: as `flaop.gla_verify` returned them, float32 (float64 on the CPU).
        state_v_first, cu_seqlens, has_initial_state: as given to `flaop.gla_verify`.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: grad mode is on and an argument requires grad.

    Cost: one kernel, which reads and writes each state once.

    Reference: Gated Linear Attention Transformers, arXiv:2312.06635.
    """
    _gla_commit_(
        *(state, state_indices, num_accepted_tokens, k, u, g),
        *(state_v_first, cu_seqlens, has_initial_state),
    )
