"""Bad input: every rank raises the same sentence, none is left in a collective."""

import pytest
import torch

import flaop.distributed as context_parallel
from flaop.testing import context_parallel as on_ranks
from flaop.testing.context_parallel import check_op, make_inputs

SHARD = {name: x[:, :32] for name, x in make_inputs("kda").items() if name in on_ranks.TOKENS}
NONE = {"cu_seqlens": torch.tensor([0]), **{n: x[:1] for n, x in SHARD.items()}}
CASES = {
    "length": ({1: SHARD}, "T, the length of a shard, must be the same on every rank"),
    "dtype": (
        {2: {"q": SHARD["q"][:, :1].expand(-1, 48, -1, -1).double()}},
        "TypeError: rank 2 of the group: k must have the dtype of q",
    ),
    "state on one rank": ({3: {"initial_state": None}}, "initial_state must be the same on every"),
    "state asked for": (
        {0: {"output_final_state": False}},
        "output_final_state must be the same on every rank of the group, got False on rank 0; True",
    ),
    "option": ({1: {"chunk_size": 32}}, "chunk_size must be the same on every rank"),
    "no sequence for a state": (
        {rank: NONE | {"initial_state": torch.zeros(0, 2, 16, 24)} for rank in range(4)},
        "need a sequence that starts and ends, got none",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_sentence_on_every_rank(ranks, case):
    changes, expected = CASES[case]
    found = ranks.run(on_ranks.call_with, 4, "kda", changes, timeout=60)
    assert len(set(found)) == 1 and found[0], found
    assert expected in found[0]


@pytest.mark.parametrize("values", [[0, 96, 192], [0, 90, 192]])
def test_offsets_that_differ(ranks, values):
    """With FLAOP_DEBUG=1, since it reads them."""
    packed = {name: x[:1, :1].expand(1, 48, *x.shape[2:]) for name, x in SHARD.items()}
    shared = packed | {"initial_state": None, "output_final_state": False}
    changes = {rank: shared | {"cu_seqlens": torch.tensor([0, 96, 192])} for rank in range(4)}
    changes[1] = shared | {"cu_seqlens": torch.tensor(values)}
    found = ranks.run(on_ranks.call_with, 4, "kda", changes, debug=True)
    assert len(set(found)) == 1
    if values == [0, 96, 192]:
        assert found[0] is None
    else:
        assert "cu_seqlens must be the same on every rank" in found[0]
        assert "with values 0,90,192 on rank 1" in found[0]


def test_offsets_outside_of_all_shards(ranks):
    packed = {name: x[:1, :1].expand(1, 48, *x.shape[2:]) for name, x in SHARD.items()}
    packed |= {"initial_state": None, "cu_seqlens": torch.tensor([0, 200])}
    changes = {rank: packed for rank in range(4)}
    found = ranks.run(on_ranks.call_with, 4, "kda", changes, debug=True)
    assert len(set(found)) == 1 and "stay in [0, T = 192]" in found[0]


def test_a_good_call_after_an_error(ranks):
    ranks.run(on_ranks.call_with, 4, "kda", CASES["length"][0])
    ranks.run(check_op, "kda", 4, K=8, V=8)


@pytest.mark.parametrize(
    "function, expected",
    [
        (on_ranks.call_on_a_group_that_is_gone, "its process group was destroyed"),
        (on_ranks.call_on_a_whole_mesh, "group must be one dimension of the mesh"),
    ],
)
def test_groups(ranks, function, expected):
    found = ranks.run(function)
    assert len(set(found)) == 1 and expected in found[0]


def test_a_group_of_others(ranks):
    found = ranks.run(on_ranks.call_on_a_group_of_others)
    assert found[3] == "" and all("must hold this process" in x for x in found[:3])


def test_without_torch_distributed():
    inputs = make_inputs("gla", T=16)
    for call in (
        lambda: context_parallel.gla(**inputs, group=None),
        lambda: context_parallel.shard(inputs["q"], None),
    ):
        with pytest.raises(ValueError, match="call torch.distributed.init_process_group first"):
            call()


def test_a_length_that_the_group_does_not_divide():
    with pytest.raises(ValueError, match="multiple of the size of the group, 4, got 10"):
        context_parallel.shard(torch.zeros(1, 10), context_parallel.Group("", 1, 4))
