"""Every configuration row of the decay families, alone, in the manner of test_gdn_configs_gpu.py.

With a gate per channel the backward within chunks takes long to compile: the fast run meets a few
rows there, the slow one all of them.
"""

import functools
import itertools

import pytest
from flaop.triton_kernels.configs import decay, decay_channel

import flaop
from flaop.testing import gla_inputs, pairwise, simple_gla_inputs
from flaop.testing.configurations import (
    BATCHED,
    PACKED,
    TILES,
    assert_rows_are_met,
    check_paths,
    head_sizes,
    in_turn,
    rows,
    with_heads,
)
from flaop.testing.expected import DecayExpected
from flaop.testing.launches import DTYPES


def scalar_rows(arch, dtype, K, V):
    functions = [decay.states, decay.scan, decay.bwd_qk]
    scan, slab = (f(arch, K, V, dtype) for f in (decay.scan, decay.bwd_qk))
    if scan is None or K > slab["BK"]:
        functions.append(decay.outputs)
    return rows(functions, arch, dtype, K, V)


CHANNEL_ROWS = functools.partial(rows, (
    decay.states, decay.scan, decay.outputs,
    decay_channel.intra, decay_channel.bwd_pairs, decay_channel.bwd_intra,
))  # fmt: skip
# Arguments of simple_gla_inputs that compile flags of their own, and what varies under them.
OPTIONS = {
    "packed": ({"gate": "both"}, PACKED),
    "batched": ({"gate": "g", "state_v_first": True}, BATCHED),
    "constant": ({"gate": "g_gamma"}, BATCHED),
    "no gate": ({"gate": None, "state_v_first": True}, PACKED[:1]),
}
# the head sizes of today's models meet every set of options in the fast run
COMMON = [("bf16", K, 64) for K in (64, 128)]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("rows_of", [scalar_rows, CHANNEL_ROWS], ids=["scalar", "channel"])
def test_the_cases_meet_every_row(rows_of, arch):
    assert_rows_are_met(rows_of, arch)


def check(inputs, split=False):
    op = flaop.chunk_simple_gla if "g_gamma" in inputs else flaop.chunk_gla
    paths = {"chunk": op}
    if split:
        paths["chunk, split"] = functools.partial(op, split_size=64)
    check_paths(DecayExpected(inputs), paths, "cuda")


def scalar_cases():
    for tiles, options, fast in in_turn(list(OPTIONS), COMMON):
        values = tiles[0], *head_sizes(*tiles[1:], odd=options == "batched"), options
        marks = [pytest.mark.xdist_group(f"decay {tiles}"), *([] if fast else [pytest.mark.slow])]
        yield pytest.param(*values, id="-".join(map(str, values)), marks=marks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, K, V, options", list(scalar_cases()))
def test_scalar_configuration(dtype, K, V, options):
    flags, variants = OPTIONS[options]
    for variant in variants:
        inputs = simple_gla_inputs(
            K=K, V=V, dtype=DTYPES[dtype], initial_state=True, **flags, **with_heads(variant, K, V)
        )
        check(inputs, split=variant["gates"] == "mixed" and K >= 64 and V >= 64)


CHANNEL_OPTIONS = {
    "packed": ({"initial_state": True, "state_v_first": True}, PACKED),
    "batched": ({"initial_state": True}, BATCHED),
    "grouped": ({}, ({"gates": "mixed", "T": 130, "H": 1, "HV": 2},)),
}
CHANNEL_FAST = [
    # most of their kernels are those of families in tests/ops/conftest.py
    ("bf16", 128, 128, "batched"), ("bf16", 256, 128, "grouped"), ("fp16", 64, 24, "packed"),
    ("fp32", 100, 128, "packed"), ("fp32", 16, 24, "batched"),
    # with these each dtype meets each tile of K
    ("bf16", 12, 72, "batched"), ("bf16", 32, 32, "packed"), ("fp16", 16, 16, "packed"),
    ("fp16", 20, 72, "batched"), ("fp32", 32, 16, "packed"),
]  # fmt: skip
CHANNEL_SLOW = [
    (dtype, *head_sizes(*tiles, odd=name == "batched"), name)
    for (dtype, *tiles), name in itertools.product(TILES, ("packed", "batched"))
]
CHANNEL = [*CHANNEL_FAST, *(x for x in CHANNEL_SLOW if x not in CHANNEL_FAST)]


def channel_cases():
    for values in CHANNEL:
        marks = [pytest.mark.xdist_group(f"channel {values}")]
        marks += [] if values in CHANNEL_FAST else [pytest.mark.slow]
        yield pytest.param(*values, id="-".join(map(str, values)), marks=marks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, K, V, options", list(channel_cases()))
def test_channel_configuration(dtype, K, V, options):
    flags, variants = CHANNEL_OPTIONS[options]
    for variant in variants:
        variant = with_heads(variant, K, V)
        check(gla_inputs(K=K, V=V, dtype=DTYPES[dtype], **flags, **variant))


@pytest.mark.gpu
@pytest.mark.xdist_group(f"channel {CHANNEL_FAST[0]}")
def test_triton_where_a_cuda_kernel_serves(monkeypatch, fresh_launches):
    """The Triton row that the CUDA C++ kernel stands in for where it was built."""
    from flaop.launch import cuda

    monkeypatch.setattr(cuda, "enabled", False)
    test_channel_configuration(*CHANNEL_FAST[0])


# The kernels of the recurrent path have rows of their own (configs/decay_recurrent.py).
RECURRENT = pairwise(
    K=(300, 128, 60, 20, 12),
    V=(72, 24, 8),
    gate=("both", "channel", "channel and value"),
    state_v_first=(False, True),
    dtype=("bf16", "fp32", "fp16"),
    variant=(PACKED[0], BATCHED[0]),
)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(RECURRENT)))
def test_recurrent_configuration(index):
    case = {"initial_state": True, **RECURRENT[index]}
    gate = case.pop("gate")
    case |= with_heads(case.pop("variant"), case["K"], case["V"])
    case["dtype"] = DTYPES[case["dtype"]]
    if gate == "both":
        inputs, op = simple_gla_inputs(gate=gate, **case), flaop.fused_recurrent_simple_gla
    else:
        inputs, op = gla_inputs(value_gate=gate != "channel", **case), flaop.fused_recurrent_gla
    check_paths(DecayExpected(inputs), {"recurrent": op}, "cuda")
