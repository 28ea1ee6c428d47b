"""Random inputs of the decode ops: tokens of a family, a pool of states and its slots."""

import torch
from torch import Tensor

from flaop.testing.decay_inputs import gla_inputs, simple_gla_inputs
from flaop.testing.gdn_inputs import gdn_inputs
from flaop.testing.inputs import kda_inputs

STEP_FAMILIES = ("kda", "gated_delta_rule", "simple_gla", "gla")
# Arguments of the functions below: what is computed inside the kernel, and what is given.
STEP_VARIANTS = {
    "kda": {"gate_in_kernel": "softplus", "l2norm": True, "beta_sigmoid": True},
    "kda bounded": {"gate_in_kernel": "bounded", "l2norm": True, "neg_eigval": True},
    "kda given": {},
    "gated_delta_rule": {"gate": "softplus", "l2norm": True, "beta_sigmoid": True},
    "gated_delta_rule given": {},
    "gated_delta_rule ungated": {"gate": None, "l2norm": True, "neg_eigval": True},
    "simple_gla": {"gate": "both"},
    "simple_gla constant": {"gate": "g_gamma"},
    "simple_gla ungated": {"gate": None},
    "gla": {},
}
_INPUTS = {
    "kda": kda_inputs,
    "gated_delta_rule": gdn_inputs,
    "simple_gla": simple_gla_inputs,
    "gla": gla_inputs,
}


def step_tokens(variant: str, **sizes) -> dict[str, Tensor | float | bool | None]:
    """Keyword arguments of ``flaop.F_step_`` but for the pool and its slots.

    Args:
        variant: of ``STEP_VARIANTS``; the first word is the family.
        sizes: B, T, H, HV, K, V, lengths, dtype, device, gates, state_v_first, seed of the inputs
            of the family.
    """
    family = variant.split()[0]
    inputs = _INPUTS[family](**{**STEP_VARIANTS[variant], **sizes})
    for name in ("initial_state", "output_final_state", "safe_gate"):
        inputs.pop(name, None)
    return inputs


def step_pool(
    slots: int,
    HV: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    state_v_first: bool = False,
    padding: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """A pool of random states, and the cache ``[slots, size]`` that it is a view of.

    Args:
        padding: elements of a row of the cache around its state, a third of them in front.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (HV, V, K) if state_v_first else (HV, K, V)
    size = HV * K * V
    cache = torch.randn(slots, size + padding, generator=generator).to(device, dtype)
    front = padding // 3
    return cache[:, front : front + size].unflatten(1, shape), cache


def step_arguments(variant: str, slots: int, *, lengths=None, B, T, H, HV, K, V, **changes) -> dict:
    """Keyword arguments of ``flaop.F_step_`` for three rows, the second of which is padding.

    Args:
        slots: of the pool.
        changes: arguments that take the place of others.
    """
    inputs = step_tokens(variant, B=B, T=T, H=H, HV=HV, K=K, V=V, lengths=lengths)
    inputs["state"], _ = step_pool(slots, HV, K, V)
    return {**inputs, "state_indices": slot_indices([0, -1, 3]), **changes}


def slot_indices(slots, device: str | torch.device = "cpu") -> Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=device)


def packed_projection(inputs: dict) -> dict:
    """The same tokens as views of one tensor ``[B, T, channels]`` that holds q, k, v, g and beta.

    Those of another dtype than q come in that of q.
    """
    names = [n for n in ("q", "k", "v", "g", "beta") if inputs.get(n) is not None]
    q = inputs["q"]
    parts = [inputs[n].to(q.dtype).flatten(2) for n in names]
    # One more, so that no row but the first is aligned.
    row = torch.cat([*parts, parts[0][..., :1]], -1)
    views, first = {}, 0
    for n, part in zip(names, parts, strict=True):
        size = part.shape[2]
        views[n] = row[..., first : first + size].unflatten(2, inputs[n].shape[2:])
        first += size
    return {**inputs, **views}
