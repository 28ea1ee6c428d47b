"""Arguments of the decode ops on a pool of states: one structure a kind of op, one place to check.

A row is a sequence of the call. It is padding, and nothing is read or written for it, if the slot
that it reads is negative or past the end of the pool.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, decay, gated_delta_rule, kda
from .checks import CHUNK, holds

FAMILIES = ("kda", "gated_delta_rule", "simple_gla", "gla")
# Of one sequence in one call of a step, verify or commit op.
MAX_TOKENS = 8


class StepCall(NamedTuple):
    """The checked arguments of one call. Sizes are symbolic while tracing.

    Any strides but in the inner three dimensions of `state`, which are contiguous.
    """

    family: str
    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None  # [B, T, HV, K] (kda, gla) or [B, T, HV]
    g_gamma: Tensor | None  # [HV], added to g at every token (simple_gla)
    beta: Tensor | None  # [B, T, HV] (delta families)
    state: Tensor  # [slots, HV, K, V], or [slots, HV, V, K] with state_v_first
    state_indices: Tensor  # [N] or [N, S], int32
    scale: float
    cu_seqlens: Tensor | None  # [N + 1]
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV, K] or [HV * K] (kda) or [HV]
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    lower_bound: float | None
    state_v_first: bool
    write_indices: Tensor | None  # as state_indices
    has_initial_state: Tensor | None  # [N], bool
    num_accepted_tokens: Tensor | None  # [N], int32, beside state_indices [N, S] only
    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int

    # Of the recurrent path of gla only.
    gv = None

    @property
    def delta(self) -> bool:
        """A delta family."""
        return self.beta is not None

    @property
    def channel(self) -> bool:
        """One gate per key channel."""
        return self.g is not None and self.g.dim() == 4

    @property
    def gated(self) -> bool:
        return self.g is not None or self.g_gamma is not None

    @property
    def state_dtype(self) -> torch.dtype:
        """What a state is computed in."""
        return torch.float64 if self.q.dtype is torch.float64 else torch.float32


class CommitCall(NamedTuple):
    """The checked arguments of one call. Sizes are symbolic while tracing."""

    state: Tensor  # [slots, HV, K, V], or [slots, HV, V, K] with state_v_first
    state_indices: Tensor  # [N], int32
    num_accepted_tokens: Tensor  # [N], int32
    k: Tensor  # [B, T, H, K], fp32
    u: Tensor  # [B, T, HV, V], fp32
    g: Tensor | None  # [B, T, HV, K] or [B, T, HV], fp32
    state_v_first: bool
    cu_seqlens: Tensor | None  # [N + 1]
    has_initial_state: Tensor | None  # [N], bool
    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int


class PoolCall(NamedTuple):
    """The checked arguments of one call of a chunk pool op."""

    step: StepCall  # of any length, with state_indices [N]
    safe_gate: bool
    chunk_size: int
    checkpoint_interval: int  # a multiple of CHUNK, or 0
    checkpoint_indices: Tensor | None  # [N, M], int32

    def chunk_call(self, initial_state: Tensor | None):
        """The call of the chunk path from these states, [N, HV, K, V] or [N, HV, V, K]."""
        s = self.step
        sizes = {n: getattr(s, n) for n in ("B", "T", "H", "HV", "K", "V", "N")}
        entering = {"initial_state": initial_state, "output_final_state": True}
        shared = {n: getattr(s, n) for n in ("q", "k", "v", "g", "scale", "cu_seqlens")} | {
            "state_v_first": s.state_v_first,
            "chunk_size": self.chunk_size,
            "split_size": 0,
        }
        if not s.delta:
            return decay.DecayCall(g_gamma=s.g_gamma, gv=None, **shared, **entering, **sizes)
        flags = {
            n: getattr(s, n)
            for n in (
                *("beta", "A_log", "dt_bias", "use_qk_l2norm_in_kernel", "use_gate_in_kernel"),
                *("use_beta_sigmoid_in_kernel", "allow_neg_eigval"),
            )
        }
        flags["disable_recompute"] = False
        if s.family == "gated_delta_rule":
            return gated_delta_rule.GdnCall(**shared, **entering, **flags, **sizes)
        flags |= {"safe_gate": self.safe_gate, "lower_bound": s.lower_bound}
        return kda.KdaCall(**shared, **entering, **flags, **sizes)


def check_step(family: str, **arguments) -> StepCall:
    """Check the arguments of a step op, by their names in its schema.

    Raises:
        ValueError: a shape, a device or a value breaks the contract.
        TypeError: a dtype does.
    """
    call = _check_inputs(family, **arguments)
    _few_tokens("q", call.q, call.N, call.cu_seqlens)
    return call


def check_verify(family: str, **arguments) -> StepCall:
    """Check the arguments of a verify op, by name; raises as check_step."""
    call = check_step(family, **arguments)
    _one_slot(call.state_indices, call.N, "verify")
    return call


def check_pool(
    family: str,
    safe_gate: bool = False,
    chunk_size: int = 64,
    checkpoint_interval: int = 0,
    checkpoint_indices: Tensor | None = None,
    **arguments,
) -> PoolCall:
    """Check the arguments of a chunk pool op, by name; raises as check_step."""
    call = _check_inputs(family, safe_gate=safe_gate, **arguments)
    _one_slot(call.state_indices, call.N, "chunk pool")
    checks.chunk_hints(chunk_size, 0)
    if checkpoint_interval < 0 or checkpoint_interval % CHUNK or checkpoint_interval % chunk_size:
        raise ValueError(
            f"checkpoint_interval must be 0 or a positive multiple of {CHUNK}, "
            f"got {checkpoint_interval}"
        )
    if (checkpoint_interval > 0) != (checkpoint_indices is not None):
        raise ValueError(
            "checkpoint_interval and checkpoint_indices go together, got checkpoint_interval = "
            f"{checkpoint_interval} and "
            f"{'no ' if checkpoint_indices is None else ''}checkpoint_indices"
        )
    if checkpoint_indices is not None:
        checks.rank("checkpoint_indices", checkpoint_indices, "N, M")
        _indices("checkpoint_indices", checkpoint_indices, call.q)
        M = checkpoint_indices.shape[1]
        checks.shape("checkpoint_indices", checkpoint_indices, (call.N, M), "N, M")
        if not holds(M >= call.T // checkpoint_interval):
            raise ValueError(
                "checkpoint_indices must have a column for each checkpoint_interval = "
                f"{checkpoint_interval} tokens, T // {checkpoint_interval} = "
                f"{call.T // checkpoint_interval} or more, got shape "
                f"{list(checkpoint_indices.shape)}"
            )
    return PoolCall(call, safe_gate, chunk_size, checkpoint_interval, checkpoint_indices)


def check_commit(
    state: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> CommitCall:
    """Check the arguments of a commit op; raises as check_step."""
    checks.rank("k", k, "B, T, H, K")
    checks.rank("u", u, "B, T, HV, V")
    B, T, H, K, HV, V = checks.heads("k", k, u, "u")
    wide = torch.float64 if k.dtype is torch.float64 else torch.float32
    for name, x in (("k", k), ("u", u), ("g", g)):
        checks.dtype(name, x, (wide,))
        checks.device(name, x, state, "state")
    N = B
    if cu_seqlens is not None:
        checks.cu_seqlens_layout(cu_seqlens, k, "k")
        N = cu_seqlens.shape[0] - 1
    gate = None
    if g.dim() == 1 and g.shape[0] == 0:
        pass
    elif g.dim() == 4:
        checks.shape("g", g, (B, T, HV, K), "B, T, HV, K")
        gate = g
    else:
        checks.shape("g", g, (B, T, HV), "B, T, HV")
        gate = g
    _few_tokens("k", k, N, cu_seqlens)
    _pool(state, k, state_v_first, (HV, K, V), "k")
    _one_slot(state_indices, N, "commit")
    _indices("state_indices", state_indices, k)
    _per_sequence("num_accepted_tokens", num_accepted_tokens, N, torch.int32, k)
    if has_initial_state is not None:
        _per_sequence("has_initial_state", has_initial_state, N, torch.bool, k)
    return CommitCall(
        state, state_indices, num_accepted_tokens, k, u, gate, state_v_first, cu_seqlens,
        has_initial_state, B, T, N, H, HV, K, V,
    )  # fmt: skip


def _check_inputs(
    family: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    state_indices: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    beta: Tensor | None = None,
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
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> StepCall:
    head = (q, k, v, g)
    flags = (
        *(A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval),
    )
    # Without a state: the pool is checked here.
    stateless = (scale, None, False, cu_seqlens)
    if family == "kda":
        inputs = kda.check(*head, beta, *stateless, *flags, safe_gate, lower_bound)
    elif family == "gated_delta_rule":
        inputs = gated_delta_rule.check(*head, beta, *stateless, *flags)
    elif family == "simple_gla":
        inputs = decay.check_simple_gla(*head, g_gamma, *stateless)
    else:
        inputs = decay.check_gla(*head, *stateless)
    B, T, N = inputs.B, inputs.T, inputs.N
    H, HV, K, V = inputs.H, inputs.HV, inputs.K, inputs.V
    _pool(state, q, state_v_first, (HV, K, V))
    per_token = _slots(state_indices, write_indices, q, T, N, cu_seqlens is not None)
    if has_initial_state is not None:
        _per_sequence("has_initial_state", has_initial_state, N, torch.bool, q)
    if num_accepted_tokens is not None:
        if not per_token:
            raise ValueError(
                "num_accepted_tokens needs one slot per token, state_indices of shape [N, S], "
                f"got {list(state_indices.shape)}"
            )
        _per_sequence("num_accepted_tokens", num_accepted_tokens, N, torch.int32, q)
    return StepCall(
        family, q, k, v, g, g_gamma, beta, state, state_indices, inputs.scale, cu_seqlens, *flags,
        lower_bound, state_v_first, write_indices, has_initial_state, num_accepted_tokens,
        B, T, N, H, HV, K, V,
    )  # fmt: skip


def _few_tokens(name: str, x: Tensor, N: int, cu_seqlens: Tensor | None) -> None:
    T = x.shape[1]
    if cu_seqlens is None:
        if not holds(T <= MAX_TOKENS):
            raise ValueError(
                f"{name} may have at most {MAX_TOKENS} tokens a sequence, got T = {T}; more are "
                "for the chunk pool op"
            )
    elif not holds(T <= N * MAX_TOKENS):
        raise ValueError(
            f"{name} may have at most {MAX_TOKENS} tokens a sequence, got T = {T} for the "
            f"N = {N} of cu_seqlens; more are for the chunk pool op"
        )


def _pool(
    state: Tensor, x: Tensor, state_v_first: bool, sizes: tuple[int, int, int], of: str = "q"
) -> None:
    """`sizes` are HV, K and V; x is called `of`."""
    HV, K, V = sizes
    rows, columns, layout = (V, K, "V, K") if state_v_first else (K, V, "K, V")
    checks.rank("state", state, f"slots, HV, {layout}")
    expected = (state.shape[0], HV, rows, columns)
    checks.shape("state", state, expected, f"slots, HV, {layout}")
    checks.state_dtype("state", state, x)
    checks.device("state", state, x, of)
    strides = state.stride()
    for i, wanted in ((3, 1), (2, columns), (1, rows * columns)):
        if not holds(strides[i] == wanted) and not holds(expected[i] == 1):
            raise ValueError(
                f"state must be contiguous in its dimensions [HV, {layout}] (its slots may lie "
                f"anywhere), got strides {list(strides)} for shape {list(state.shape)}"
            )
    if not holds(strides[0] >= HV * rows * columns) and not holds(expected[0] <= 1):
        raise ValueError(
            f"state must have slots that do not overlap, got strides {list(strides)} for shape "
            f"{list(state.shape)}"
        )


def _indices(name: str, x: Tensor, q: Tensor) -> None:
    checks.dtype(name, x, (torch.int32,))
    checks.device(name, x, q)


def _per_sequence(name: str, x: Tensor, N: int, dtype: torch.dtype, q: Tensor) -> None:
    checks.shape(name, x, (N,), "N")
    checks.dtype(name, x, (dtype,))
    checks.device(name, x, q)


def _one_slot(state_indices: Tensor, N: int, kind: str) -> None:
    if state_indices.dim() != 1:
        raise ValueError(
            f"state_indices must have shape [N] = [{N}] in a {kind} op, one slot per sequence, "
            f"got {list(state_indices.shape)}"
        )
    checks.shape("state_indices", state_indices, (N,), "N")


def _slots(
    state_indices: Tensor,
    write_indices: Tensor | None,
    q: Tensor,
    T: int,
    N: int,
    packed: bool,
) -> bool:
    """Whether there is one slot per token."""
    per_token = state_indices.dim() == 2
    if per_token:
        S = state_indices.shape[1]
        checks.shape("state_indices", state_indices, (N, S), "N, S")
        if not holds(S >= 1) or not (packed or holds(S >= T)):
            raise ValueError(
                "state_indices of shape [N, S] must have a slot for each token, S >= "
                f"{'1' if packed else f'T = {T}'}, got {list(state_indices.shape)}"
            )
    elif state_indices.dim() == 1:
        checks.shape("state_indices", state_indices, (N,), "N")
    else:
        raise ValueError(
            f"state_indices must have shape [N] or [N, S] with N = {N}, "
            f"got {list(state_indices.shape)}"
        )
    _indices("state_indices", state_indices, q)
    if write_indices is not None:
        layout = "N, S" if per_token else "N"
        checks.shape("write_indices", write_indices, tuple(state_indices.shape), layout)
        _indices("write_indices", write_indices, q)
    return per_token
