"""What the recurrence of a decay family takes, and gradients of the inputs from its gradients."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flaop.reference.activation import LEAST_GATE, compute_dtype


class Inputs(NamedTuple):
    """Inputs of the recurrence in the dtype it is computed in."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K], or [B, T, HV, 1] for a gate per head: natural log of the decay
    gv: Tensor | None = None  # [B, T, HV, V], of the decay along the values


def inputs(call) -> Inputs:
    dtype = compute_dtype(call)
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    least = LEAST_GATE[dtype]
    if call.channel:
        gv = call.gv if call.gv is None else call.gv.to(dtype).clamp_min(least)
        return Inputs(q, k, v, call.g.to(dtype).clamp_min(least), gv)
    g = v.new_zeros(v.shape[:3]) if call.g is None else call.g.to(dtype)
    if call.g_gamma is not None:
        g = g + call.g_gamma.to(dtype)
    return Inputs(q, k, v, g.clamp_min(least).unsqueeze(-1))


def input_gradients(
    call,
    x: Inputs,
    grads: Inputs,
    d_initial_state: Tensor | None,
    names: Sequence[str],
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments in ``names``, in their shapes and dtypes.

    Args:
        grads: gradients of ``x``; of q and k for each value head, ``[B, T, HV, K]``.
        d_initial_state: in the layout and dtype of the initial state.
        mask: which of ``names`` are wanted; the others are ``None``, as is that of an absent input.
    """
    grads = grads._asdict()
    for name in ("q", "k"):
        grads[name] = grads[name].unflatten(2, (call.H, -1)).sum(3)
    for name in ("g", "gv"):
        gate = getattr(x, name)
        if gate is not None:
            # a gate at its floor has no slope
            grads[name] = grads[name].masked_fill(gate <= LEAST_GATE[gate.dtype], 0)
    grads["g_gamma"] = grads["g"].sum((0, 1))
    grads["initial_state"] = d_initial_state
    results = []
    for name, wanted in zip(names, mask, strict=True):
        argument = getattr(call, name)
        if wanted and argument is not None:
            results.append(grads[name].to(argument.dtype).reshape(argument.shape))
        else:
            results.append(None)
    return tuple(results)
