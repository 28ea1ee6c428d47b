"""The functions of flaop.distributed on 2 and 4 processes against one process."""

import itertools

import pytest
import torch

from flaop.testing.context_parallel import check_op, check_surroundings
from flaop.testing.summaries import SUMMARY_FAMILIES

FAMILIES = list(SUMMARY_FAMILIES)
# of 192 tokens: shards of 96 and of 48
LENGTHS = {
    "one sequence over all ranks": None,
    "borders inside ranks": [50, 0, 100, 42],
    "borders on borders of ranks": [48, 48, 0, 96],
    "over three ranks": [10, 150, 0, 32],
    "tokens of no sequence": [0, 20, 30, 0],
    "one packed": [192],
    "the last is empty": [96, 0, 95, 1, 0],
}
VARIANTS = [
    {"gates": "mixed", "state_v_first": False},
    {"gates": "slow", "state_v_first": True},
    {"gates": "slow", "initial_state": False, "output_final_state": False},
]
# each variant meets each family, and each layout on both sizes
CASES = [
    (family, lengths, size, VARIANTS[(i + j + k) % 3])
    for (i, family), (j, lengths), (k, size) in itertools.product(
        enumerate(FAMILIES), enumerate(LENGTHS), enumerate((2, 4))
    )
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(ranks, family, size):
    for case, lengths, processes, variant in CASES:
        if (case, processes) == (family, size):
            ranks.run(check_op, family, size, lengths=LENGTHS[lengths], **variant)


@pytest.mark.parametrize("loss", ["o", "final_state"])
@pytest.mark.parametrize("family", FAMILIES)
def test_through_one_output(ranks, family, loss):
    ranks.run(check_op, family, 4, loss, lengths=LENGTHS["over three ranks"], gates="slow")


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(ranks, family):
    options = {"dtype": torch.bfloat16, "gates": "slow"}
    ranks.run(check_op, family, 4, lengths=LENGTHS["borders inside ranks"], **options)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "gate"),
    [("kda", {"gate_in_kernel": "bounded"}), ("gated_delta_rule", {"gate": None})],
)
def test_one_pass(ranks, size, family, gate):
    """A batch in bfloat16: outputs beside the summary."""
    options = {"dtype": torch.bfloat16, "gates": "slow", "K": 32, "V": 32}
    ranks.run(check_op, family, size, **options)
    ranks.run(check_op, family, size, **options, state_v_first=True, **gate)
    ranks.run(check_op, family, size, **options, initial_state=False, output_final_state=False)
    ranks.run(check_op, family, size, compiled="aot_eager", **options)


def test_other_gates(ranks):
    ranks.run(check_op, "kda", 4, gate_in_kernel="bounded", neg_eigval=True)
    ranks.run(check_op, "kda", 4, gate_in_kernel=None, lengths=LENGTHS["one packed"])
    ranks.run(check_op, "gated_delta_rule", 4, gate=None, lengths=LENGTHS["over three ranks"])
    ranks.run(check_op, "simple_gla", 4, gate=None)
    ranks.run(check_op, "simple_gla", 2, gate="g_gamma", lengths=LENGTHS["over three ranks"])


def test_hints_and_short_shards(ranks):
    ranks.run(check_op, "kda", 4, T=8, disable_recompute=True)
    ranks.run(check_op, "gla", 4, T=8, split_size=64, chunk_size=16, lengths=[1, 5, 0, 2])


@pytest.mark.parametrize("family", ["kda", "simple_gla"])
def test_autocast_checkpoint_and_double_backward(ranks, family):
    ranks.run(check_surroundings, family)
