"""The families of operators that are measured: their inputs, their oracle, their FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CHUNK = 64
ATTENTION = "scaled_dot_product_attention"
PRECOMPUTED = "precomputed"
GATE_KINDS = ("bounded", "softplus", PRECOMPUTED)


@dataclass(frozen=True)
class Family:
    """What the benchmark must know of ``name``, ``chunk_name`` and ``fused_recurrent_name``."""

    # Sizes, dtype, device, lengths and a case's options to the keyword arguments of the ops.
    inputs: Callable[..., dict]
    # Takes these arguments, returns o and the final state in float64.
    oracle: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    # FLOPs per token and value head of the chunk form, forward and backward, from K and V.
    forward: Callable[[int, int], float]
    backward: Callable[[int, int], float]
    # FLOPs per token, value head and state element of the recurrent form.
    recurrent: int
    # How the gate may be given; the first is the default.
    gate_kinds: tuple[str, ...] = (PRECOMPUTED,)
    # Gate kind to the options that the inputs of this family alone have.
    options: Callable[[str], dict] = lambda kind: {}
    # split_size bounds the states that the backward keeps.
    splits: bool = False


def _kda_inputs(*sizes, **options) -> dict:
    from flaop.testing import kda_inputs

    inputs = kda_inputs(*sizes, **options)
    if inputs["dt_bias"] is not None:
        # Flat, because fla returns its gradient flat.
        inputs["dt_bias"] = inputs["dt_bias"].flatten()
    return inputs


def _simple_gla_inputs(*sizes, **options) -> dict:
    from flaop.testing import simple_gla_inputs

    return _without(simple_gla_inputs(*sizes, gate="g", **options), "g_gamma")


def _gla_inputs(*sizes, dtype: torch.dtype, **options) -> dict:
    from flaop.testing import gla_inputs

    inputs = gla_inputs(*sizes, dtype=dtype, **options)
    # As a layer under autocast makes it: this gate is as large as q.
    return {**inputs, "g": inputs["g"].to(dtype)}


def _retention_inputs(*sizes, **options) -> dict:
    from flaop.testing import simple_gla_inputs

    return _without(simple_gla_inputs(*sizes, gate=None, **options), "g", "g_gamma")


def _gdn_inputs(*sizes, **options) -> dict:
    from flaop.testing import gdn_inputs

    return gdn_inputs(*sizes, **options)


def _delta_rule_inputs(*sizes, **options) -> dict:
    inputs = _gdn_inputs(*sizes, gate=None, **options)
    return _without(inputs, "g", "A_log", "dt_bias", "use_gate_in_kernel")


def _without(inputs: dict, *names: str) -> dict:
    return {name: value for name, value in inputs.items() if name not in names}


def _kda_options(kind: str) -> dict:
    gate = None if kind == PRECOMPUTED else kind
    return {"gate_in_kernel": gate, "l2norm": True, "beta_sigmoid": True}


def _gdn_options(kind: str) -> dict:
    """A log gate comes with beta itself, a raw one with its logit."""
    ready = kind == PRECOMPUTED
    return {"gate": "g" if ready else kind, "l2norm": True, "beta_sigmoid": not ready}


def _delta_rule_options(kind: str) -> dict:
    return {"l2norm": True}


def _kda_oracle(**inputs):
    from flaop.testing import kda_oracle

    return kda_oracle(**inputs)


def _simple_gla_oracle(**inputs):
    from flaop.testing import simple_gla_oracle

    return simple_gla_oracle(**inputs)


def _gla_oracle(**inputs):
    from flaop.testing import gla_oracle

    return gla_oracle(**inputs)


def _retention_oracle(v, **inputs):
    head = torch.arange(v.shape[2], dtype=torch.float64)
    return _simple_gla_oracle(v=v, g_gamma=torch.log1p(-(2.0 ** (-5 - head))), **inputs)


def _gdn_oracle(**inputs):
    from flaop.testing import gdn_oracle

    return gdn_oracle(**inputs)


def _delta_rule_oracle(**inputs):
    return _gdn_oracle(g=None, **inputs)


def _attention_oracle(q, k, v):
    q, k = (x.double().transpose(1, 2) for x in (q, k))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return (weights @ v.double().transpose(1, 2)).transpose(1, 2), None


def _delta_forward(K: int, V: int) -> float:
    """Three products with the state; two pair matrices; the inverse and the scores times values."""
    return 6 * K * V + 4 * CHUNK * (K + V)


def _kda_backward(K: int, V: int) -> float:
    """At K = V = 128: 475 thousand, against 164 thousand forward."""
    return _delta_forward(K, V) * 475 / 163.84


def _delta_backward(K: int, V: int) -> float:
    """A gate per head or none, from the inputs alone.

    States again (4KV + 2CV), their gradients (6KV + 4CV), gradients within the chunk (6KV, 8CK and
    4CV) and the pair matrices again (4CK).
    """
    return 16 * K * V + CHUNK * (12 * K + 10 * V)


def _decay_forward(K: int, V: int) -> float:
    """State update and its read-out; scores and their product with v."""
    return 4 * K * V + 2 * CHUNK * (K + V)


def _decay_backward(K: int, V: int) -> float:
    """States again, their gradients, dq, dk and dv from them; scores again and three from dA."""
    return 10 * K * V + CHUNK * (6 * K + 4 * V)


def _decay(inputs: Callable, oracle: Callable) -> Family:
    return Family(inputs, oracle, _decay_forward, _decay_backward, recurrent=5, splits=True)


FAMILIES = {
    "kda": Family(
        *(_kda_inputs, _kda_oracle, _delta_forward, _kda_backward, 7, GATE_KINDS, _kda_options)
    ),
    "gated_delta_rule": Family(
        *(_gdn_inputs, _gdn_oracle, _delta_forward, _delta_backward, 7),
        gate_kinds=(PRECOMPUTED, "softplus"),
        options=_gdn_options,
    ),
    "delta_rule": Family(
        *(_delta_rule_inputs, _delta_rule_oracle, _delta_forward, _delta_backward, 6),
        options=_delta_rule_options,
    ),
    "simple_gla": _decay(_simple_gla_inputs, _simple_gla_oracle),
    "gla": _decay(_gla_inputs, _gla_oracle),
    "retention": _decay(_retention_inputs, _retention_oracle),
}
# Steps of one token on a pool of states.
POOL_OPS = tuple(f"{name}_step_" for name in ("kda", "gated_delta_rule", "simple_gla", "gla"))
OPS = tuple(prefix + name for name in FAMILIES for prefix in ("chunk_", "fused_recurrent_", ""))
OPS += POOL_OPS


def family_name(op: str) -> str:
    """The family of an op; attention is measured on the inputs of KDA."""
    if op == ATTENTION:
        return "kda"
    return op.removeprefix("chunk_").removeprefix("fused_recurrent_").removesuffix("_step_")


def family(op: str) -> Family:
    return FAMILIES[family_name(op)]


def oracle(op: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    return _attention_oracle if op == ATTENTION else family(op).oracle
