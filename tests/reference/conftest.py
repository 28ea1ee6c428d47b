"""The reference and the oracle on the same arguments, as dictionaries of named results."""

import pytest
import torch

from flaop.reference import gated_delta_rule as gdn_reference
from flaop.reference import kda as kda_reference
from flaop.testing import gdn_oracle, kda_oracle
from flaop.validation import gated_delta_rule as gdn_validation
from flaop.validation import kda as kda_validation

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def is_kda(kwargs):
    return kwargs["g"] is not None and kwargs["g"].ndim == 4


@pytest.fixture
def evaluate():
    """evaluate(kind, kwargs, d_o, d_final_state): outputs, and gradients of what is not None."""

    def run(kind, kwargs, d_o=None, d_final_state=None):
        kda = is_kda(kwargs)
        call = (kda_validation if kda else gdn_validation).check(**kwargs)
        reference = kda_reference if kda else gdn_reference
        forward = getattr(reference, f"{kind}_forward")
        backward = getattr(reference, f"{kind}_backward")
        o, final_state, *residuals = forward(call)
        results = {"o": o, "final_state": final_state}
        if d_o is not None or d_final_state is not None:
            mask = [kwargs[name] is not None for name in INPUTS]
            gradients = backward(call, d_o, d_final_state, *residuals, mask)
            for name, gradient, wanted in zip(INPUTS, gradients, mask, strict=True):
                assert (gradient is not None) == wanted
                if wanted:
                    assert gradient.dtype == kwargs[name].dtype
                    assert gradient.is_contiguous()
                    results[f"d_{name}"] = gradient
        return results

    return run


@pytest.fixture
def expect():
    """expect(kwargs, d_o, d_final_state): the same from the oracle, differentiated by autograd."""

    def run(kwargs, d_o=None, d_final_state=None):
        inputs = {name: kwargs[name] for name in INPUTS if kwargs[name] is not None}
        inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        oracle = kda_oracle if is_kda(kwargs) else gdn_oracle
        o, final_state = oracle(**{**kwargs, **inputs})
        results = {"o": o.detach(), "final_state": final_state.detach()}
        loss = sum(
            (x * d_x.double()).sum()
            for x, d_x in ((o, d_o), (final_state, d_final_state))
            if d_x is not None
        )
        if d_o is not None or d_final_state is not None:
            gradients = torch.autograd.grad(
                loss, list(inputs.values()), allow_unused=True, materialize_grads=True
            )
            results |= {f"d_{name}": x for name, x in zip(inputs, gradients, strict=True)}
        return results

    return run
