"""Random inputs of the gated delta rule, in the regimes where its numerics differ."""

import torch
from torch import Tensor

from flaop.testing.inputs import (
    bias_for,
    generators,
    kda_inputs,
    mean_head_gates,
    on_device,
    wide_dtype,
)


def gdn_inputs(
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
    dt_bias: bool = True,
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
    """Keyword arguments for ``flaop.gated_delta_rule`` and ``flaop.chunk_gated_delta_rule``.

    Args:
        HV: value heads, a multiple of ``H``; ``None`` means ``H``.
        dtype: of q, k, v, beta and the raw gate. A log gate, the gate's parameters and the state
            are float32 (float64 when ``dtype`` is).
        gates: ``"fast"`` (mean -2.5 per token), ``"slow"`` (mean -0.001), or ``"mixed"``: every
            other head fast.
        gate: ``"g"`` gives the log gate itself, ``"softplus"`` a raw gate with ``A_log`` that lands
            in the same regime, ``None`` no gate.
        dt_bias: with ``"softplus"``; without it gates are in between, whatever ``gates`` says.
        l2norm: normalise q and k in the op; otherwise they come normalised.
        neg_eigval: beta up to 2; implies ``beta_sigmoid``.
        lengths: packed sequences of these lengths, zeros allowed; ``B`` becomes 1, ``T`` their sum.
        requires_grad: of every floating-point tensor.
    """
    if gate not in ("g", "softplus", None):
        raise ValueError(f"gate must be 'g', 'softplus' or None, got {gate!r}")
    inputs = kda_inputs(
        *(B, T, H, HV, K, V),
        dtype=dtype,
        l2norm=l2norm,
        beta_sigmoid=beta_sigmoid,
        neg_eigval=neg_eigval,
        lengths=lengths,
        initial_state=initial_state,
        state_v_first=state_v_first,
        output_final_state=output_final_state,
        seed=seed,
    )
    for name in ("safe_gate", "lower_bound"):
        del inputs[name]
    # another stream than that of the inputs above
    normal, uniform = generators(dtype, seed + 1000)
    B, T, HV, _ = inputs["v"].shape
    mean = mean_head_gates(gates, HV, wide_dtype(dtype), uniform)
    g, raw, A_log = 2 * mean * uniform(B, T, HV), normal(B, T, HV).to(dtype), 0.2 * normal(HV)
    inputs["g"] = {"g": g, "softplus": raw, None: None}[gate]
    inputs["use_gate_in_kernel"] = gate == "softplus"
    if gate == "softplus":
        inputs["A_log"] = A_log
        inputs["dt_bias"] = bias_for(mean, "softplus") if dt_bias else None
    tensors = {n: x for n, x in inputs.items() if isinstance(x, Tensor) and n != "cu_seqlens"}
    inputs |= on_device(tensors, device, requires_grad)
    if inputs["cu_seqlens"] is not None:
        inputs["cu_seqlens"] = inputs["cu_seqlens"].to(device)
    return inputs
