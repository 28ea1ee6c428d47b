"""Random inputs of the decay families, in the regimes where their numerics differ."""

import torch
from torch import Tensor

from flaop.testing.inputs import (
    boundaries,
    generators,
    mean_gates,
    mean_head_gates,
    on_device,
    sizes,
    wide_dtype,
)


def simple_gla_inputs(
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
    gate: str | None = "g",
    lengths: list[int] | None = None,
    initial_state: bool = False,
    state_v_first: bool = False,
    output_final_state: bool = True,
    requires_grad: bool = False,
    seed: int = 0,
) -> dict[str, Tensor | float | bool | None]:
    """Keyword arguments for ``flaop.simple_gla`` and ``flaop.chunk_simple_gla``.

    Args:
        HV: value heads, a multiple of ``H``; ``None`` means ``H``.
        dtype: of q, k, v. Gates and the state are float32 (float64 when ``dtype`` is).
        gates: ``"fast"`` (mean -2.5 per token), ``"slow"`` (mean -0.001), or ``"mixed"``: every
            other head fast.
        gate: ``"g"``, ``"g_gamma"``, ``"both"`` (half of the decay each), or ``None``.
        lengths: packed sequences of these lengths, zeros allowed; ``B`` becomes 1, ``T`` their sum.
        requires_grad: of every floating-point tensor.
    """
    if gate not in ("g", "g_gamma", "both", None):
        raise ValueError(f"gate must be 'g', 'g_gamma', 'both' or None, got {gate!r}")
    B, T, HV, N = sizes(B, T, H, HV, lengths)
    normal, uniform = generators(dtype, seed)
    tensors = _queries_keys_values(B, T, H, HV, K, V, dtype, normal)
    mean = mean_head_gates(gates, HV, wide_dtype(dtype), uniform)
    share = 0.5 if gate == "both" else 1.0
    g, g_gamma = 2 * mean * uniform(B, T, HV), mean * (0.5 + uniform(HV))
    tensors["g"] = share * g if gate in ("g", "both") else None
    tensors["g_gamma"] = share * g_gamma if gate in ("g_gamma", "both") else None
    state_shape = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    tensors["initial_state"] = normal(*state_shape) if initial_state else None
    return {
        **on_device(tensors, device, requires_grad),
        "scale": None,
        "output_final_state": output_final_state,
        "cu_seqlens": boundaries(lengths, device),
        "state_v_first": state_v_first,
    }


def gla_inputs(
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
    value_gate: bool = False,
    lengths: list[int] | None = None,
    initial_state: bool = False,
    state_v_first: bool = False,
    output_final_state: bool = True,
    requires_grad: bool = False,
    seed: int = 0,
) -> dict[str, Tensor | float | bool | None]:
    """Keyword arguments for ``flaop.gla`` and ``flaop.chunk_gla``.

    Args:
        HV: value heads, a multiple of ``H``; ``None`` means ``H``.
        dtype: of q, k, v. Gates and the state are float32 (float64 when ``dtype`` is).
        gates: ``"fast"`` (mean -2.5 per token), ``"slow"`` (mean -0.001), or ``"mixed"``: each head
            and channel one or the other.
        value_gate: add a gate ``gv`` per value channel, which ``chunk_gla`` does not take.
        lengths: packed sequences of these lengths, zeros allowed; ``B`` becomes 1, ``T`` their sum.
        requires_grad: of every floating-point tensor.
    """
    B, T, HV, N = sizes(B, T, H, HV, lengths)
    normal, uniform = generators(dtype, seed)
    wide = wide_dtype(dtype)
    tensors = _queries_keys_values(B, T, H, HV, K, V, dtype, normal)
    tensors["g"] = 2 * mean_gates(gates, (HV, K), wide, uniform) * uniform(B, T, HV, K)
    state_shape = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    tensors["initial_state"] = normal(*state_shape) if initial_state else None
    if value_gate:
        tensors["gv"] = 2 * mean_gates(gates, (HV, V), wide, uniform) * uniform(B, T, HV, V)
    return {
        **on_device(tensors, device, requires_grad),
        "scale": None,
        "output_final_state": output_final_state,
        "cu_seqlens": boundaries(lengths, device),
        "state_v_first": state_v_first,
    }


def _queries_keys_values(B, T, H, HV, K, V, dtype, normal) -> dict[str, Tensor | None]:
    """q and k come normalised."""
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
