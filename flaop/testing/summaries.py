"""Inputs and the oracle of the summary ops and of context parallelism, for every family."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flaop.testing.decay_inputs import gla_inputs, simple_gla_inputs
from flaop.testing.decay_oracle import gla_oracle, simple_gla_oracle
from flaop.testing.gdn_inputs import gdn_inputs
from flaop.testing.gdn_oracle import gdn_oracle
from flaop.testing.inputs import kda_inputs
from flaop.testing.oracle import kda_oracle


class Family(NamedTuple):
    """A family with all that its gate and its options can be."""

    inputs: Callable
    options: dict
    oracle: Callable


SUMMARY_FAMILIES = {
    "kda": Family(
        kda_inputs,
        {"gate_in_kernel": "softplus", "l2norm": True, "beta_sigmoid": True},
        kda_oracle,
    ),
    "gated_delta_rule": Family(
        gdn_inputs, {"gate": "softplus", "l2norm": True, "beta_sigmoid": True}, gdn_oracle
    ),
    "simple_gla": Family(simple_gla_inputs, {"gate": "both"}, simple_gla_oracle),
    "gla": Family(gla_inputs, {}, gla_oracle),
}


class Summary(NamedTuple):
    """What tokens do to a state, [N, HV, K, V] and [N, HV, K, K], float64 on the CPU."""

    state: Tensor  # that they leave of zeros
    transfer: Tensor  # applied to the state that enters
    d_state: Tensor  # gradient of the state that enters, from d_o alone
    d_transfer: Tensor  # applied to the gradient of the state that leaves


def summary_oracle(family: str, inputs: dict, d_o: Tensor) -> Summary:
    """The summary of each sequence by the token loop: the state is affine in the one that enters.

    Args:
        inputs: keyword arguments of ``flaop.<family>``; their states are not read.
        d_o: gradient of the outputs.
    """
    oracle = SUMMARY_FAMILIES[family].oracle
    inputs = {
        name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()
    } | {"state_v_first": False, "output_final_state": True}
    B, _, _, K = inputs["q"].shape
    HV, V = inputs["v"].shape[2:]
    N = B if inputs["cu_seqlens"] is None else len(inputs["cu_seqlens"]) - 1
    zeros = torch.zeros(N, HV, K, V, dtype=torch.float64, requires_grad=True)
    o, state = oracle(**{**inputs, "initial_state": zeros})
    (d_state,) = torch.autograd.grad(o, zeros, d_o.cpu().double())
    eye = torch.eye(K, dtype=torch.float64).expand(N, HV, K, K)
    nothing = torch.zeros(*inputs["v"].shape[:3], K, dtype=inputs["v"].dtype)
    _, transfer = oracle(**{**inputs, "v": nothing, "initial_state": eye})
    return Summary(state.detach(), transfer, d_state, transfer.mT)
