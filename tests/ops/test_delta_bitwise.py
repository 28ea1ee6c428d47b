"""What must be equal to the last bit: prefixes, neighbours in a pack, repeated calls."""

import pytest
import torch

import flaop
from flaop.testing.bitwise import gradients, per_token, with_other_tokens

PATHS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")

pytestmark = pytest.mark.usefixtures("poisoned_memory", "single_thread")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("family", ["delta main", "delta without gate"])
def test_a_prefix_does_not_know_what_follows(delta_device, family, path, grad, arguments):
    inputs = arguments(family, T=200, lengths=None, device=delta_device, requires_grad=grad)
    fn = getattr(flaop, path)
    o, _ = fn(**inputs)
    for length in (1, 15, 16, 63, 64, 70, 128, 199):
        other, _ = fn(**with_other_tokens(inputs, length, 200))
        assert torch.equal(o[:, :length], other[:, :length]), length
        assert not torch.equal(o[:, length:], other[:, length:]), length


@pytest.mark.parametrize("path", PATHS)
def test_a_prefix_of_a_packed_sequence(delta_device, path, arguments):
    inputs = arguments("delta packed", lengths=[70, 90], device=delta_device)
    fn = getattr(flaop, path)
    o, _ = fn(**inputs)
    for length in (1, 64, 69, 71, 75, 134, 159):
        other, _ = fn(**with_other_tokens(inputs, length, 160))
        assert torch.equal(o[:, :length], other[:, :length]), length


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_packed_sequences_do_not_know_their_neighbours(delta_device, path, changed, arguments):
    bounds = (0, 70, 71, 150)
    options = {"lengths": [70, 1, 79], "device": delta_device, "requires_grad": True}
    inputs = arguments("delta packed", **options)
    others = with_other_tokens(inputs, bounds[changed], bounds[changed + 1])
    fn = getattr(flaop, path)
    (o, state), found = gradients(fn, inputs)
    (other_o, other_state), other_found = gradients(fn, others)
    for n in {0, 1, 2} - {changed}:
        tokens = slice(bounds[n], bounds[n + 1])
        assert torch.equal(o[:, tokens], other_o[:, tokens])
        assert torch.equal(state[n], other_state[n])
        assert torch.equal(found["initial_state"][n], other_found["initial_state"][n])
        for name in per_token(inputs):
            assert torch.equal(found[name][:, tokens], other_found[name][:, tokens]), name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["delta main", "delta packed", "delta without gate"])
def test_two_calls_are_equal(delta_device, family, path, arguments):
    inputs = arguments(family, device=delta_device, requires_grad=True)
    outputs, found = gradients(getattr(flaop, path), inputs)
    for _ in range(3):
        again, found_again = gradients(getattr(flaop, path), inputs)
        for x, y in zip(outputs, again, strict=True):
            assert torch.equal(x, y)
        for name, x in found.items():
            assert torch.equal(x, found_again[name]), name
