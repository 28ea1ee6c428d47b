"""The hybrid model: FSDP2 over one dimension of a mesh, context parallelism over the other."""

import pytest

from flaop.testing.context_parallel_layers import check_hybrid


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)], ids=str)
def test_three_steps_are_those_of_one_process(ranks, mesh):
    ranks.run(check_hybrid, mesh)
