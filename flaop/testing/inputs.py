"""Random inputs of the ops, in the regimes where their numerics differ.

Made on the CPU: one seed gives the same values on every device.
"""

import math

import torch
from torch import Tensor

# Mean log decay per token of the two regimes.
FAST = -2.5
SLOW = -0.001
# The bound of the bounded gate, the widest that safe_gate allows.
LOWER_BOUND = -5.0


def kda_inputs(
    B: int = 1,
    T: int = 64,
    H: int = 2,
    HV: int | None = None,
    K: int = 64,
    V: int = 64,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gates: str = "mixed",
    gate_in_kernel: str | None = None,
    l2norm: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    lengths: list[int] | None = None,
    initial_state: bool = False,
    state_v_first: bool = False,
    output_final_state: bool = True,
    requires_grad: bool = False,
    seed: int = 0,
) -> dict[str, Tensor | float | bool | None]:
    """Keyword arguments for ``flaop.kda`` and ``flaop.chunk_kda``.

    Args:
        HV: value heads, a multiple of ``H``; ``None`` means ``H``.
        dtype: of q, k, v, beta and the raw gate. A log gate, the gate's parameters and the state
            are float32 (float64 when ``dtype`` is).
        gates: ``"fast"`` (mean -2.5 per token), ``"slow"`` (mean -0.001), or ``"mixed"``: each head
            and channel one or the other.
        gate_in_kernel: ``None`` gives the log gate itself, ``"softplus"`` and ``"bounded"`` a raw
            gate with ``A_log`` and ``dt_bias`` that lands in the same regime.
        l2norm: normalise q and k in the op; otherwise they come normalised.
        neg_eigval: beta up to 2; implies ``beta_sigmoid``.
        lengths: packed sequences of these lengths, zeros allowed; ``B`` becomes 1, ``T`` their sum.
        requires_grad: of every floating-point tensor.
    """
    if lengths is not None:
        B, T = 1, sum(lengths)
    if HV is None:
        HV = H
    N = B if lengths is None else len(lengths)
    beta_sigmoid = beta_sigmoid or neg_eigval
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=wide)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=wide)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    if not l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    beta = normal(B, T, HV)
    if not beta_sigmoid:
        beta = beta.sigmoid()

    if gates == "mixed":
        mean = torch.where(uniform(HV, K) < 0.5, FAST, SLOW).to(wide)
    elif gates in ("fast", "slow"):
        mean = torch.full((HV, K), FAST if gates == "fast" else SLOW, dtype=wide)
    else:
        raise ValueError(f"gates must be 'fast', 'slow' or 'mixed', got {gates!r}")

    A_log = dt_bias = None
    if gate_in_kernel is None:
        g = 2 * mean * uniform(B, T, HV, K)
    else:
        g = normal(B, T, HV, K).to(dtype)
        A_log = 0.2 * normal(HV)
        dt_bias = _bias_for(mean, gate_in_kernel)

    state_shape = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    tensors = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": v.to(dtype),
        "g": g,
        "beta": beta.to(dtype),
        "initial_state": normal(*state_shape) if initial_state else None,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    for name, x in tensors.items():
        if x is not None:
            tensors[name] = x.to(device).requires_grad_(requires_grad)
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)
    return {
        **tensors,
        "scale": None,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
        "use_qk_l2norm_in_kernel": l2norm,
        "use_gate_in_kernel": gate_in_kernel is not None,
        "use_beta_sigmoid_in_kernel": beta_sigmoid,
        "allow_neg_eigval": neg_eigval,
        "safe_gate": gate_in_kernel == "bounded",
        "lower_bound": LOWER_BOUND if gate_in_kernel == "bounded" else None,
        "state_v_first": state_v_first,
    }


def _bias_for(mean: Tensor, gate: str) -> Tensor:
    """The ``dt_bias [HV, K]`` that brings the gate of a standard normal raw gate near ``mean``."""
    if gate == "softplus":
        # In its tail softplus is exp, whose mean over a standard normal is larger by sqrt(e).
        tail = torch.where(mean > -0.1, math.exp(-0.5), 1.0)
        return torch.log(torch.expm1(-mean * tail))
    if gate == "bounded":
        return torch.logit(mean / LOWER_BOUND)
    raise ValueError(f"gate_in_kernel must be None, 'softplus' or 'bounded', got {gate!r}")
