"""The C++ autograd and autocast kernels of the KDA ops: what they hand on, and what they refuse."""

import pytest
import torch

import flaop
from flaop.testing import kda_inputs, kda_oracle, relative_error

OPS = torch.ops.flaop
PATHS = ["chunk", "fused_recurrent"]
INPUTS = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"]


def full_inputs(**kwargs):
    sizes = {"T": 70, "H": 1, "HV": 2, "K": 16, "V": 8, **kwargs}
    return kda_inputs(gate_in_kernel="softplus", beta_sigmoid=True, initial_state=True, **sizes)


@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("output", ["o", "final_state", "both"])
def test_each_gradient_alone(backend, output):
    """One input and one output at a time: masks, and incoming gradients that are absent."""
    # The final state does not depend on q.
    for name in INPUTS[1:] if output == "final_state" else INPUTS:
        inputs = full_inputs()
        inputs[name].requires_grad_()
        gradients = []
        for fn in (lambda **x: flaop.kda(**x, backend=backend), kda_oracle):
            o, state = fn(**inputs)
            loss = {"o": o.sum(), "final_state": state.sum(), "both": o.sum() + state.sum()}[output]
            gradients += torch.autograd.grad(loss, inputs[name])
        assert gradients[0].dtype == inputs[name].dtype
        assert relative_error(*gradients) < 1e-4, name


@pytest.mark.parametrize("backend", PATHS)
def test_gradients_asked_for_later(backend):
    """The mask is that of the backward call, not of the forward."""
    inputs = full_inputs(requires_grad=True)
    o, state = flaop.kda(**inputs, backend=backend)
    loss = o.sum() + state.sum()
    every = torch.autograd.grad(loss, [inputs[n] for n in INPUTS], retain_graph=True)
    for name, expected in zip(INPUTS, every):
        (alone,) = torch.autograd.grad(loss, inputs[name], retain_graph=True)
        assert torch.equal(alone, expected)


@pytest.mark.parametrize("backend", PATHS)
def test_gradcheck(backend):
    inputs = full_inputs(T=5, K=3, V=2, dtype=torch.float64)
    tensors = tuple(inputs[name].double().requires_grad_() for name in INPUTS)

    def call(*values):
        return flaop.kda(**{**inputs, **dict(zip(INPUTS, values))}, backend=backend)

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("backend", PATHS)
def test_an_unrequested_final_state_is_none_and_has_no_gradient(backend):
    inputs = full_inputs(requires_grad=True)
    inputs["output_final_state"] = False
    o, state = flaop.kda(**inputs, backend=backend)
    assert state is None and o.grad_fn is not None
    arguments = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    with torch.no_grad():
        arguments[3] = -arguments[3].abs()
    _, empty = getattr(OPS, f"{backend}_kda").default(*arguments)
    assert empty.shape == (0,) and not empty.requires_grad


@pytest.mark.parametrize("backend", PATHS)
def test_double_backward_raises(backend):
    inputs = full_inputs(requires_grad=True)
    o, _ = flaop.kda(**inputs, backend=backend)
    with pytest.raises(NotImplementedError, match="no double backward"):
        torch.autograd.grad(o.sum(), inputs["q"], create_graph=True)


@pytest.mark.parametrize("name", ["chunk_kda_fwd", "fused_recurrent_kda_fwd", "flash_kda_fwd"])
def test_ops_without_a_gradient_refuse_one(name):
    inputs = kda_inputs(T=5, H=1, K=8, V=8, requires_grad=True)
    arguments = [inputs[n] for n in ("q", "k", "v", "g", "beta")]
    with pytest.raises(NotImplementedError, match=f"{name} is not differentiable: .*flaop::"):
        getattr(OPS, name).default(*arguments)
    if name != "flash_kda_fwd":
        with torch.no_grad():
            getattr(OPS, name).default(*arguments)


@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("shape", [(2, 0), (0, 5)], ids=["no token", "no batch"])
def test_empty_calls_pass_the_state_on(backend, shape):
    inputs = kda_inputs(B=2, T=5, H=1, K=8, V=8, initial_state=True, state_v_first=True)
    B, T = shape
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name][:B, :T].detach().requires_grad_()
    inputs["initial_state"] = inputs["initial_state"][:B].bfloat16().requires_grad_()
    o, state = flaop.kda(**inputs, backend=backend)
    assert o.shape == (B, T, 1, 8)
    assert state.dtype == torch.float32
    assert torch.equal(state, inputs["initial_state"].float())
    (o.sum() + 2 * state.sum()).backward()
    assert (inputs["initial_state"].grad == 2).all()
    assert inputs["q"].grad.shape == inputs["q"].shape


@pytest.mark.parametrize("backend", PATHS)
def test_no_sequence(backend):
    inputs = kda_inputs(T=5, H=1, K=8, V=8)
    inputs["cu_seqlens"] = torch.zeros(1, dtype=torch.int32)
    o, state = flaop.kda(**inputs, backend=backend)
    assert not o.any() and o.shape == (1, 5, 1, 8)
    assert state.shape == (0, 1, 8, 8)


@pytest.mark.parametrize("name", ["kda", "chunk_kda", "fused_recurrent_kda"])
def test_autocast_casts_q_k_v_only(name):
    inputs = full_inputs(T=20, requires_grad=True)
    seen = {}

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op._schema.name.endswith("kda_fwd"):
                names = [argument.name for argument in op._schema.arguments]
                values = dict(zip(names, args))
                seen.update({n: values[n].dtype for n in INPUTS})
            return op(*args, **(kwargs or {}))

    with torch.autocast("cpu", dtype=torch.bfloat16), Recorder():
        o, state = getattr(flaop, name)(**inputs)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert {n for n in INPUTS if seen[n] == torch.bfloat16} == {"q", "k", "v"}
    o.float().sum().backward()
    assert inputs["q"].grad.dtype == torch.float32


def test_one_backward_serves_checkpointing():
    from torch.utils.checkpoint import checkpoint

    inputs = full_inputs(requires_grad=True)
    gradients = []
    for use_checkpoint in (False, True):
        call = (lambda f: checkpoint(f, use_reentrant=False)) if use_checkpoint else (lambda f: f())
        o, state = call(lambda: flaop.kda(**inputs))
        gradients.append(torch.autograd.grad(o.sum() + state.sum(), [inputs[n] for n in INPUTS]))
    for plain, recomputed in zip(*gradients):
        assert torch.equal(plain, recomputed)


def test_function_transforms_say_that_they_cannot():
    inputs = full_inputs()
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: flaop.kda(**{**inputs, "q": q})[0].sum())(inputs["q"])
