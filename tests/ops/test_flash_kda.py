"""The fused inference kernel of KDA on the GPU: values, pieces, bits, capture, compilation."""

import itertools

import pytest
import torch

import flaop
from flaop._extension import bindings
from flaop.testing import (
    assert_within_budget,
    chunk_budget_reference,
    kda_inputs,
    kda_oracle,
    pairwise,
    relative_error,
    worst_error,
)
from flaop.testing.bitwise import with_other_tokens
from flaop.testing.compilation import Compiled
from flaop.testing.graphs import assert_all_equal, capture, refresh, replay, step

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (HOPPER and bindings.FLASH_KDA_BUILT), reason="needs compute capability 9.0 and nvcc"
    ),
    pytest.mark.usefixtures("poisoned_memory"),
]
NAMES = [a.name for a in torch.ops.flaop.flash_kda_fwd.default._schema.arguments]
PACKED = (0, 1, 130, 0, 17, 64, 300)


def inputs_for(T=130, gates="mixed", lower_bound=-5.0, H=2, state_dtype=torch.float32, **options):
    """Arguments of flash_kda_fwd; state_dtype None: no initial state."""
    inputs = kda_inputs(**{
        "T": T, "H": H, "K": 128, "V": 128, "dtype": torch.bfloat16, "device": "cuda",
        "gates": gates, "gate_in_kernel": "bounded", "l2norm": True, "beta_sigmoid": True,
        "initial_state": state_dtype is not None, "state_v_first": True, **options,
    })  # fmt: skip
    if state_dtype is not None:
        inputs["initial_state"] = inputs["initial_state"].to(state_dtype)
    return inputs | {"lower_bound": lower_bound}


def check(inputs, o, final_state):
    expected, reference = kda_oracle(**inputs), chunk_budget_reference(**inputs)
    for name, got, dims in (("o", o, (0, 1, 2)), ("final_state", final_state, (0, 1))):
        i = name != "o"
        assert_within_budget(name, got, expected[i], reference[i], torch.bfloat16, dims=dims)


@pytest.mark.parametrize(
    "case",
    pairwise(
        T=(1, 15, 16, 17, 63, 64, 65, 300, 1000),
        gates=("fast", "slow", "mixed"),
        lower_bound=(-5.0, -1.0, -0.01),
        H=(1, 3),
        state_dtype=(None, torch.float32, torch.bfloat16, torch.float16),
        neg_eigval=(False, True),
        pieces=(0, 1, 2, 5),
    ),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_values(case):
    pieces = case.pop("pieces")
    inputs = inputs_for(**case)
    check(inputs, *flaop.flash_kda_fwd(**inputs, pieces=pieces))


@pytest.mark.parametrize("pieces", [0, 1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gates", ["fast", "slow", "mixed"])
def test_packed_sequences(gates, dtype, pieces):
    inputs = inputs_for(lengths=list(PACKED), gates=gates)
    inputs["cu_seqlens"] = inputs["cu_seqlens"].to(dtype)
    check(inputs, *flaop.flash_kda_fwd(**inputs, pieces=pieces))


def long_loop(inputs):
    """The token loop in float64 on the GPU, one captured step for all heads."""
    from flaop.testing.oracle import activated_inputs

    q, k, g, beta = activated_inputs(
        *(inputs[name] for name in ("q", "k", "g", "beta", "A_log", "dt_bias")),
        *(True, True, True, inputs["allow_neg_eigval"], inputs["lower_bound"], torch.float64),
    )
    q, k, decay, beta = (x[0].cuda() for x in (q * 128**-0.5, k, g.exp(), beta))
    v = inputs["v"][0].double()
    T, H = v.shape[:2]
    S = torch.zeros(H, 128, 128, dtype=torch.float64, device="cuda")  # [H, V, K]
    if inputs["initial_state"] is not None:
        S.copy_(inputs["initial_state"][0])
    o, t = torch.empty_like(v), torch.zeros(1, dtype=torch.int64, device="cuda")

    def token():
        q_t, k_t, v_t, a_t, beta_t = (x.index_select(0, t)[0] for x in (q, k, v, decay, beta))
        S.mul_(a_t.unsqueeze(1))
        u = beta_t.unsqueeze(1) * (v_t - (S @ k_t.unsqueeze(2)).squeeze(2))
        S.add_(u.unsqueeze(2) * k_t.unsqueeze(1))
        o.index_copy_(0, t, (S @ q_t.unsqueeze(2)).squeeze(2).unsqueeze(0))
        t.add_(1)

    start = S.clone()
    token()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token()
    S.copy_(start)
    t.zero_()
    for _ in range(T):
        graph.replay()
    return o.unsqueeze(0), S.unsqueeze(0)


@pytest.mark.parametrize("gates", ["fast", "slow", "mixed"])
@pytest.mark.parametrize("T, H", [(8192, 32), (8192, 96), (65536, 3)])
def test_long_sequences(T, H, gates):
    inputs = inputs_for(T=T, H=H, gates=gates, seed=1)
    expected = long_loop(inputs)
    chunked = flaop.chunk_kda(**inputs)  # rounds as the budget reference does
    for pieces in (0, 1, 5):
        for got, other, want, rows in zip(
            flaop.flash_kda_fwd(**inputs, pieces=pieces), chunked, expected,
            ((0, 1, 2), (0, 1)), strict=True,
        ):  # fmt: skip
            assert_within_budget("o or state", got, want, other, torch.bfloat16)
            # one wrong row among so many would not show; small rows count by the size of the whole
            assert worst_error(got, want, rows, floor=1.0) < 3e-2


@pytest.mark.slow
def test_offsets_beyond_32_bits():
    lengths = [4_000_000, 1000]
    last = slice(lengths[0], None)
    inputs = inputs_for(lengths=lengths, H=4)
    o, state = flaop.flash_kda_fwd(**inputs, pieces=2)
    alone = dict(inputs) | {name: inputs[name][:, last] for name in ("q", "k", "v", "g", "beta")}
    alone["initial_state"] = inputs["initial_state"][1:]
    alone["cu_seqlens"] = torch.tensor([0, lengths[1]], device="cuda")
    other, other_state = flaop.flash_kda_fwd(**alone, pieces=2)
    assert torch.equal(o[:, last], other) and torch.equal(state[1:], other_state)
    assert o.isfinite().all()


def test_a_prefix_does_not_know_what_follows():
    inputs = inputs_for(T=200)
    o, _ = flaop.flash_kda_fwd(**inputs, pieces=1)
    for length in (1, 7, 15, 16, 40, 63, 64, 70, 128, 199):
        other, _ = flaop.flash_kda_fwd(**with_other_tokens(inputs, length, 200), pieces=1)
        assert torch.equal(o[:, :length], other[:, :length]), length
        assert not torch.equal(o[:, length:], other[:, length:]), length


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_sequences_do_not_know_their_neighbours(pieces):
    lengths = [170, 1, 99]
    inputs = inputs_for(lengths=lengths)
    o, state = flaop.flash_kda_fwd(**inputs, pieces=pieces)
    bounds = [0, *itertools.accumulate(lengths)]
    for changed in range(3):
        others = with_other_tokens(inputs, bounds[changed], bounds[changed + 1])
        other, other_state = flaop.flash_kda_fwd(**others, pieces=pieces)
        for n in {0, 1, 2} - {changed}:
            tokens = slice(bounds[n], bounds[n + 1])
            assert torch.equal(o[:, tokens], other[:, tokens])
            assert torch.equal(state[n], other_state[n])


def test_wrong_boundaries_write_nowhere_else():
    inputs = inputs_for(T=200, state_dtype=None)
    inputs["initial_state"] = None
    for offsets in ([10, 100, 150], [10, 300, 50, -3], [-7, 64, 64]):
        inputs["cu_seqlens"] = torch.tensor(offsets, device="cuda")
        o, state = flaop.flash_kda_fwd(**inputs)
        bounds = torch.tensor(offsets).clamp(0, 200).cummax(0).values.tolist()
        assert (o[:, : bounds[0]] == 0).all() and (o[:, bounds[-1] :] == 0).all()
        assert o.isfinite().all() and state.isfinite().all()


@pytest.mark.parametrize("pieces", [1, 3])
def test_repeated_calls_agree_to_the_last_bit(pieces):
    inputs = inputs_for(T=1000, H=96)
    first = flaop.flash_kda_fwd(**inputs, pieces=pieces)
    for _ in range(100):
        assert_all_equal(flaop.flash_kda_fwd(**inputs, pieces=pieces), first)


@pytest.mark.parametrize("pieces", [0, 1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_replay_with_new_values(packed, pieces):
    shape = {"lengths": [128] * 4} if packed else {"T": 512}

    def fn(**arguments):
        return flaop.flash_kda_fwd(**arguments, pieces=pieces)

    inputs = inputs_for(**shape)
    graph, results = capture(fn, inputs, False)
    boundaries = ([0, 128, 256, 384, 512], [0, 1, 2, 511, 512], [0, 0, 9, 9, 300])
    for seed, offsets in enumerate(boundaries):
        values = inputs_for(**shape, seed=seed)
        if packed:
            values["cu_seqlens"] = torch.tensor(offsets, device="cuda")
        expected = step(fn, values, False)
        refresh(inputs, values)
        assert_all_equal(replay(graph, results), expected)


def test_a_compiled_model_contains_the_op():
    inputs = inputs_for(T=300)

    def model(q):
        o, state = flaop.kda(**{**inputs, "q": q})
        return o * 2, state

    compiled = Compiled(model, dynamic=False)
    with torch.no_grad():
        o, state = compiled.call(inputs["q"])
        expected, expected_state = flaop.flash_kda_fwd(**inputs)
    assert compiled.graphs == [["flash_kda_fwd"]]
    assert torch.equal(o, expected * 2) and torch.equal(state, expected_state)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_opcheck(packed, state_dtype):
    inputs = inputs_for(**({"lengths": [66, 0, 1]} if packed else {}), state_dtype=state_dtype)
    inputs |= {"output_final_state": state_dtype is not None, "pieces": 0}
    torch.library.opcheck(torch.ops.flaop.flash_kda_fwd.default, tuple(inputs[n] for n in NAMES))


def test_the_dispatcher_takes_it():
    inputs = inputs_for(T=300)
    with torch.no_grad():
        assert flaop.explain(flaop.kda, **inputs).path == "flash_kda"
        assert_all_equal(flaop.kda(**inputs), flaop.flash_kda_fwd(**inputs))
        with flaop.backend("chunk"):
            o, _ = flaop.kda(**inputs)
    assert relative_error(o, flaop.flash_kda_fwd(**inputs)[0]) < 1e-2
    assert flaop.explain(flaop.kda, **{**inputs, "state_v_first": False}).path == "chunk"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"state_v_first": False}, "state_v_first is False"),
        ({"lower_bound": -6.0}, r"lower_bound in \[-5, 0\)"),
        ({"use_gate_in_kernel": False}, "use_gate_in_kernel is False"),
        ({"pieces": -1}, "pieces must be at least 0"),
    ],
)
def test_what_it_cannot_serve_raises(changes, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        flaop.flash_kda_fwd(**{**inputs_for(), **changes})


def test_empty_calls():
    inputs = inputs_for(T=5)
    empty = {name: inputs[name][:, :0] for name in ("q", "k", "v", "g", "beta")}
    o, state = flaop.flash_kda_fwd(**{**inputs, **empty})
    assert o.shape == (1, 0, 2, 128) and torch.equal(state, inputs["initial_state"])


@pytest.mark.parametrize("layout", ["strided", "unaligned"])
def test_layouts(layout):
    inputs = inputs_for(T=70)
    expected = flaop.flash_kda_fwd(**inputs)
    for name in ("q", "k", "v", "g", "beta"):
        x = inputs[name]
        if layout == "strided":
            inputs[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            inputs[name] = torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    assert_all_equal(flaop.flash_kda_fwd(**inputs), expected)
