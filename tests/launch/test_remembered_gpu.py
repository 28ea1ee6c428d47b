"""Chunk ops go without Python from the second call of a kind on, and give the same bits."""

import os

import pytest
import torch

import flaop
from flaop.testing import gdn_inputs, gla_inputs, kda_inputs, simple_gla_inputs

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles: not in the interpreter's process", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_launches")]

FUSED = {"gate_in_kernel": "bounded", "l2norm": True, "beta_sigmoid": True}
# op, inputs, and the module whose `forward` launches it
FAMILIES = {
    "kda": (flaop.chunk_kda, kda_inputs, FUSED, "delta.chunk"),
    "gated_delta_rule": (flaop.chunk_gated_delta_rule, gdn_inputs, {"l2norm": True}, "delta.gdn"),
    "simple_gla": (flaop.chunk_simple_gla, simple_gla_inputs, {}, "decay.chunk"),
    "gla": (flaop.chunk_gla, gla_inputs, {}, "decay.chunk"),
}
SHAPES = {
    "batched": {"B": 2, "T": 130},
    "batched, no state": {"B": 2, "T": 130, "output_final_state": False},
    "packed": {"lengths": [65, 0, 1, 130], "initial_state": True},
    "packed, no state": {"lengths": [65, 0, 1, 130], "output_final_state": False},
    "values first": {"T": 100, "initial_state": True, "state_v_first": True},
}


def made(family, seed, **options):
    _, make, flags, _ = FAMILIES[family]
    return make(
        **({"H": 2, "K": 128, "V": 128} | flags | options),
        dtype=torch.bfloat16, device="cuda", seed=seed,
    )  # fmt: skip


def same(got, expected):
    return all(
        x is None and y is None or torch.equal(x, y) for x, y in zip(got, expected, strict=True)
    )


@pytest.fixture
def refusing(monkeypatch):
    """refusing(family): its launcher in Python raises from now on."""

    def refuse(call, visit=None, remember=False):
        raise AssertionError("the launcher in Python was called")

    return lambda family: monkeypatch.setattr(
        f"flaop.launch.{FAMILIES[family][3]}.forward", refuse
    )


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_call(family, shape, fresh_launches, refusing):
    op, all_inputs = FAMILIES[family][0], [made(family, i, **SHAPES[shape]) for i in range(3)]
    expected = []
    for x in all_inputs:
        fresh_launches()
        expected.append(op(**x))
    refusing(family)
    for x, y in zip(reversed(all_inputs), reversed(expected), strict=True):
        torch.full((1 << 24,), torch.nan, device="cuda")  # what scratch memory may hold
        assert same(op(**x), y)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_another_kind_of_call_asks_the_launcher(family, refusing):
    op = FAMILIES[family][0]
    op(**made(family, 0, T=130))
    refusing(family)
    op(**made(family, 1, T=130))
    for other in ({"T": 131}, {"T": 130, "K": 64}, {"T": 130, "initial_state": True}):
        with pytest.raises(AssertionError, match="in Python"):
            op(**made(family, 1, **other))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_that_are_copied(family):
    """Every other head of twice as many: the copies are not those of a call before."""
    op, names = FAMILIES[family][0], ("q", "k", "v")
    for seed in range(3):
        x = made(family, seed, T=130)
        expected = op(**x)
        strided = x | {n: x[n].repeat_interleave(2, dim=2)[:, :, ::2] for n in names}
        assert same(op(**strided), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_that_share_memory(family):
    """q and k are one tensor in the first call, two in the second."""
    op, x = FAMILIES[family][0], made(family, 0, T=130)
    together = op(**x | {"k": x["q"]})
    assert same(op(**x | {"k": x["q"].clone()}), together)
    assert not same(op(**x), together)


@torch.no_grad()
def test_a_capture_of_a_remembered_call():
    first, second = made("kda", 0, T=130), made("kda", 1, T=130)
    expected = flaop.chunk_kda(**second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flaop.chunk_kda(**first)
    for name, x in first.items():
        if isinstance(x, torch.Tensor):
            x.copy_(second[name])
    graph.replay()
    assert same(got, expected)
