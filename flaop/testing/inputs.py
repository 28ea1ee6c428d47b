"""Random inputs of the ops, in the regimes where their numerics differ.

Made on the CPU: one seed gives the same values on every device.
"""

import math
from collections.abc import Callable

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
    B, T, HV, N = sizes(B, T, H, HV, lengths)
    beta_sigmoid = beta_sigmoid or neg_eigval
    normal, uniform = generators(dtype, seed)
    wide = wide_dtype(dtype)
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    if not l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    beta = normal(B, T, HV)
    if not beta_sigmoid:
        beta = beta.sigmoid()

    mean = mean_gates(gates, (HV, K), wide, uniform)
    A_log = dt_bias = None
    if gate_in_kernel is None:
        g = 2 * mean * uniform(B, T, HV, K)
    else:
        g = normal(B, T, HV, K).to(dtype)
        A_log = 0.2 * normal(HV)
        dt_bias = bias_for(mean, gate_in_kernel)

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
    return {
        **on_device(tensors, device, requires_grad),
        "scale": None,
        "output_final_state": output_final_state,
        "cu_seqlens": boundaries(lengths, device),
        "use_qk_l2norm_in_kernel": l2norm,
        "use_gate_in_kernel": gate_in_kernel is not None,
        "use_beta_sigmoid_in_kernel": beta_sigmoid,
        "allow_neg_eigval": neg_eigval,
        "safe_gate": gate_in_kernel == "bounded",
        "lower_bound": LOWER_BOUND if gate_in_kernel == "bounded" else None,
        "state_v_first": state_v_first,
    }


def sizes(
    B: int, T: int, H: int, HV: int | None, lengths: list[int] | None
) -> tuple[int, int, int, int]:
    """B, T, HV and the number of sequences N."""
    if lengths is not None:
        B, T = 1, sum(lengths)
    return B, T, H if HV is None else HV, B if lengths is None else len(lengths)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gates and states beside q, k, v in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def generators(
    dtype: torch.dtype, seed: int
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """normal(*shape) and uniform(*shape) of one seed."""
    wide = wide_dtype(dtype)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=wide)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=wide)

    return normal, uniform


def mean_gates(
    gates: str, shape: tuple[int, ...], dtype: torch.dtype, uniform: Callable[..., Tensor]
) -> Tensor:
    """Mean log decay per token of each head and channel."""
    if gates == "mixed":
        return torch.where(uniform(*shape) < 0.5, FAST, SLOW).to(dtype)
    if gates in ("fast", "slow"):
        return torch.full(shape, FAST if gates == "fast" else SLOW, dtype=dtype)
    raise ValueError(f"gates must be 'fast', 'slow' or 'mixed', got {gates!r}")


def mean_head_gates(
    gates: str, HV: int, dtype: torch.dtype, uniform: Callable[..., Tensor]
) -> Tensor:
    """Mean log decay per token of each head; "mixed": every other head fast."""
    if gates == "mixed":
        return torch.where(torch.arange(HV) % 2 == 1, FAST, SLOW).to(dtype)
    return mean_gates(gates, (HV,), dtype, uniform)


def on_device(
    tensors: dict[str, Tensor | None], device: str | torch.device, requires_grad: bool
) -> dict[str, Tensor | None]:
    return {
        name: None if x is None else x.to(device).requires_grad_(requires_grad)
        for name, x in tensors.items()
    }


def boundaries(lengths: list[int] | None, device: str | torch.device) -> Tensor | None:
    """cu_seqlens of sequences of these lengths."""
    if lengths is None:
        return None
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)


def bias_for(mean: Tensor, gate: str) -> Tensor:
    """The ``dt_bias [HV, K]`` that brings the gate of a standard normal raw gate near ``mean``."""
    if gate == "softplus":
        # In its tail softplus is exp, whose mean over a standard normal is larger by sqrt(e).
        tail = torch.where(mean > -0.1, math.exp(-0.5), 1.0)
        return torch.log(torch.expm1(-mean * tail))
    if gate == "bounded":
        return torch.logit(mean / LOWER_BOUND)
    raise ValueError(f"gate_in_kernel must be None, 'softplus' or 'bounded', got {gate!r}")
