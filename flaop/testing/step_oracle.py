"""The float64 token loop that the decode ops are measured against, sequence by sequence.

S <- Diag(exp(g_t)) S                       decay first
u_t = beta_t (v_t - S^T k_t)                delta correction (delta families; otherwise v_t)
S <- S + k_t u_t^T                          write
o_t = scale * S^T q_t                       read, after the write
S <- S rounded to the dtype of the pool
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flaop.testing.gdn_oracle import one_channel
from flaop.testing.oracle import activated_inputs


class StepTokens(NamedTuple):
    """What enters the recurrence, float64 on the CPU, heads repeated."""

    q: Tensor  # [tokens, HV, K], scaled
    k: Tensor  # [tokens, HV, K]
    v: Tensor  # [tokens, HV, V]
    g: Tensor  # [tokens, HV, K or 1]
    beta: Tensor | None  # [tokens, HV]


def step_oracle(
    pool: Tensor,
    inputs: dict,
    *,
    dtype: torch.dtype | None = None,
    accepted: list[int] | None = None,
) -> Tensor:
    """Runs a step, a verify or a chunk pool op, and returns o ``[B, T, HV, V]``.

    Args:
        pool: float64 ``[slots, HV, K, V]`` on the CPU whatever the layout of the op's. Changed.
        inputs: the keyword arguments of the op; its state is not looked at.
        dtype: that states are rounded to after every token; ``None`` does not round.
        accepted: tokens of each sequence that change the pool: verify and commit.
    """
    tokens = step_inputs_of(inputs)
    v = inputs["v"]
    B, T, HV, V = v.shape
    bounds = [n * T for n in range(B + 1)]
    if inputs.get("cu_seqlens") is not None:
        bounds = inputs["cu_seqlens"].tolist()
    sources, targets = _slots(inputs, len(bounds) - 1)
    checkpoints = inputs.get("checkpoint_indices")
    entering = pool.clone()
    o = torch.zeros(B * T, HV, V, dtype=torch.float64)

    def put(slot: int, S: Tensor) -> None:
        if 0 <= slot < len(pool):
            pool[slot] = S

    for n, (source, row) in enumerate(zip(sources, targets, strict=True)):
        if not 0 <= source < len(pool):
            continue
        S = entering[source]
        if inputs.get("has_initial_state") is not None and not inputs["has_initial_state"][n]:
            S = torch.zeros_like(S)
        kept = S
        for t in range(bounds[n + 1] - bounds[n]):
            if isinstance(row, list) and t >= len(row):
                break
            S, o[bounds[n] + t] = _token(tokens, bounds[n] + t, S)
            if dtype is not None:
                S = S.to(dtype).double()
            if accepted is None or t < accepted[n]:
                kept = S
                if isinstance(row, list):
                    put(row[t], S)
            if checkpoints is not None and (t + 1) % inputs["checkpoint_interval"] == 0:
                put(int(checkpoints[n, (t + 1) // inputs["checkpoint_interval"] - 1]), S)
        if not isinstance(row, list):
            put(row, kept)
    return o.view(B, T, HV, V)


def step_inputs_of(inputs: dict) -> StepTokens:
    """The tokens of a call, all sequences in one row."""
    q, k, v, g, beta = (inputs.get(n) for n in ("q", "k", "v", "g", "beta"))
    scale = q.shape[3] ** -0.5 if inputs.get("scale") is None else inputs["scale"]
    if beta is None:
        q, k = q.cpu().double(), k.cpu().double()
        gates = one_channel(g, v).cpu().double() if g is None or g.ndim == 3 else g.cpu().double()
        if inputs.get("g_gamma") is not None:
            gates = gates + inputs["g_gamma"].cpu().double().unsqueeze(-1)
    else:
        gates = one_channel(g, v) if g is None or g.ndim == 3 else g
        dt_bias = inputs["dt_bias"]
        q, k, gates, beta = activated_inputs(
            *(q, k, gates, beta, inputs["A_log"], dt_bias),
            *(inputs["use_qk_l2norm_in_kernel"], inputs["use_gate_in_kernel"]),
            *(inputs["use_beta_sigmoid_in_kernel"], inputs["allow_neg_eigval"]),
            *(inputs.get("lower_bound"), torch.float64),
        )
        beta = beta.flatten(0, 1)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).flatten(0, 1) for x in (q, k))
    return StepTokens(q * scale, k, v.cpu().double().flatten(0, 1), gates.flatten(0, 1), beta)


def _token(x: StepTokens, t: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """The state ``[HV, K, V]`` after token t, and its output ``[HV, V]``."""
    S = S * x.g[t].exp().unsqueeze(-1)
    u = x.v[t]
    if x.beta is not None:
        u = x.beta[t].unsqueeze(-1) * (u - torch.einsum("hkv,hk->hv", S, x.k[t]))
    S = S + x.k[t].unsqueeze(-1) * u.unsqueeze(-2)
    return S, torch.einsum("hkv,hk->hv", S, x.q[t])


def _slots(inputs: dict, N: int) -> tuple[list[int], list]:
    """The slot that each sequence reads, and the one or those that it writes."""
    sources = inputs["state_indices"].tolist()
    targets = sources
    if inputs.get("write_indices") is not None:
        targets = inputs["write_indices"].tolist()
    if inputs["state_indices"].ndim == 1:
        return sources, targets
    accepted = [1] * N
    if inputs.get("num_accepted_tokens") is not None:
        accepted = inputs["num_accepted_tokens"].tolist()
    columns = [max(a, 1) - 1 for a in accepted]
    return [row[c] if c < len(row) else -1 for row, c in zip(sources, columns)], targets
