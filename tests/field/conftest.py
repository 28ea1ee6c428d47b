"""Fixtures of the field reports: both paths, and the comparison with the float64 token loop."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import flaop
from flaop.testing import (
    gdn_inputs,
    gdn_oracle,
    gla_inputs,
    gla_oracle,
    kda_oracle,
    relative_error,
    simple_gla_inputs,
    simple_gla_oracle,
)

PATHS = {"chunk": flaop.chunk_kda, "recurrent": flaop.fused_recurrent_kda}
GRADIENTS = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"),
    *("g_gamma", "gv"),
)
OUTPUT_LIMITS = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-2,
}
GRADIENT_LIMITS = {**OUTPUT_LIMITS, torch.float16: 2e-2, torch.bfloat16: 2e-2}


@pytest.fixture(params=PATHS)
def fn(request):
    """Each path that serves every call."""
    return PATHS[request.param]


class Path(NamedTuple):
    """One path of a family beside KDA."""

    fn: Callable
    inputs: Callable
    oracle: Callable
    tokens: tuple[str, ...]

    @property
    def family(self):
        return self.fn.__name__.removeprefix("chunk_").removeprefix("fused_recurrent_")

    @property
    def chunk(self):
        return self.fn.__name__.startswith("chunk_")

    @property
    def recurrent(self):
        """The token loop of the family in one kernel."""
        return getattr(flaop, f"fused_recurrent_{self.family}")


GATED = ("q", "k", "v", "g")
DECAY = {
    "chunk_simple_gla": Path(flaop.chunk_simple_gla, simple_gla_inputs, simple_gla_oracle, GATED),
    "recurrent_simple_gla": Path(
        flaop.fused_recurrent_simple_gla, simple_gla_inputs, simple_gla_oracle, GATED
    ),
    "chunk_gla": Path(flaop.chunk_gla, gla_inputs, gla_oracle, GATED),
    "recurrent_gla": Path(flaop.fused_recurrent_gla, gla_inputs, gla_oracle, GATED),
}
DELTA = {
    "chunk_gdn": Path(flaop.chunk_gated_delta_rule, gdn_inputs, gdn_oracle, (*GATED, "beta")),
    "recurrent_gdn": Path(
        flaop.fused_recurrent_gated_delta_rule, gdn_inputs, gdn_oracle, (*GATED, "beta")
    ),
}


@pytest.fixture(params=DECAY)
def decay(request):
    """Each path of the decay families with kernels of their own."""
    return DECAY[request.param]


@pytest.fixture(params=DELTA)
def delta(request):
    """Each path of the gated delta rule."""
    return DELTA[request.param]


@pytest.fixture(params=DECAY | DELTA)
def path(request):
    """Both of the above: for probes that ask the same of every family."""
    return (DECAY | DELTA)[request.param]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """So that an element no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _leaves(inputs):
    """Detached copies that require grad."""
    tensors = {n: inputs[n] for n in GRADIENTS if isinstance(inputs.get(n), torch.Tensor)}
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def _results(fn, inputs, loss):
    leaves = _leaves(inputs)
    o, state = fn(**{**inputs, **leaves})
    generator = torch.Generator().manual_seed(1)
    total = 0.0
    for name, x in (("o", o), ("state", state)):
        d_x = torch.randn(o.shape if name == "o" else state.shape, generator=generator)
        if loss in (name, "both"):
            # a 16-bit cotangent is exact everywhere
            total = total + (x * d_x.bfloat16().to(x)).double().sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {"o": o.detach(), "state": state.detach()}, dict(zip(leaves, gradients))


@pytest.fixture
def gradients_of():
    """gradients_of(fn, inputs, loss="both") -> (outputs, gradients), by name."""
    return lambda fn, inputs, loss="both": _results(fn, inputs, loss)


@pytest.fixture
def pieces_make_one_run():
    """pieces_make_one_run(fn, inputs, tokens, pieces): outputs, final state and all gradients."""

    def compare(fn, inputs, tokens, pieces):
        def split(**inputs):
            state, outputs, start = inputs["initial_state"], [], 0
            for length in pieces:
                part = {name: inputs[name][:, start : start + length] for name in tokens}
                o, state = fn(**{**inputs, **part, "initial_state": state})
                outputs.append(o)
                start += length
            return torch.cat(outputs, dim=1), state

        results = []
        for call in (split, fn):
            o, state = call(**inputs)
            loss = o.square().sum() + state.square().sum()
            leaves = [inputs[name] for name in (*tokens, "initial_state")]
            results.append([o, state, *torch.autograd.grad(loss, leaves)])
        for got, ref in zip(*results):
            assert relative_error(got, ref) < 1e-4

    return compare


@pytest.fixture
def gives_the_same_bits():
    """gives_the_same_bits(fn, inputs): 50 times, half of them beside work on another stream."""

    def compare(fn, inputs):
        first = _results(fn, inputs, "both")
        noise, stream = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
        for i in range(50):
            if i % 2:
                with torch.cuda.stream(stream):
                    noise @ noise
            for found, expected in zip(_results(fn, inputs, "both"), first):
                for name, x in expected.items():
                    assert torch.equal(found[name], x), name

    return compare


@pytest.fixture
def matches():
    """matches(fn, inputs, loss="both", zero=1e-6, oracle=kda_oracle): each output and gradient.

    oracle: the token loop of the family.
    loss: "o", "state" or "both" get random cotangents. zero: gradients whose largest element is
    below it in the loop must be so in the op.
    """

    def compare(fn, inputs, loss="both", zero=1e-6, oracle=kda_oracle):
        inputs = {**inputs, "output_final_state": True}
        outputs, gradients = _results(fn, inputs, loss)
        expected, expected_gradients = _results(oracle, inputs, loss)
        dtype = inputs["q"].dtype
        for found, refs, limits in (
            (outputs, expected, OUTPUT_LIMITS),
            (gradients, expected_gradients, GRADIENT_LIMITS),
        ):
            for name, x in found.items():
                ref = refs[name]
                assert x.shape == ref.shape, name
                assert torch.isfinite(x).all(), name
                if ref.numel() == 0:
                    continue
                if ref.abs().max() < zero:
                    assert x.abs().max() < zero, name
                else:
                    limit = max(limits[dtype], limits.get(x.dtype, 0.0))
                    error = relative_error(x, ref)
                    assert error < limit, f"{name}: {error:.2e}"
        return outputs, gradients

    return compare
