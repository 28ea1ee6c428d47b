"""One graph without a break, with collectives in it, equal to eager."""

import pytest

from flaop.testing.context_parallel import check_lengths, check_op
from flaop.testing.context_parallel_layers import check_layer
from flaop.testing.summaries import SUMMARY_FAMILIES

PACKED = [50, 0, 100, 42]


@pytest.mark.parametrize("family", SUMMARY_FAMILIES)
def test_ops(ranks, family):
    ranks.run(check_op, family, 2, compiled="aot_eager", lengths=PACKED)


@pytest.mark.parametrize("family", ["simple_gla", pytest.param("kda", marks=pytest.mark.slow)])
def test_lengths_compile_nothing(ranks, family):
    """Once for inference and once for training."""
    assert ranks.run(check_lengths, family, 2, [48, 20])[:2] == [2, 2]


@pytest.mark.parametrize(
    "name, backend",
    [
        ("kda", "aot_eager"),
        pytest.param("gdn", "aot_eager", marks=pytest.mark.slow),
        pytest.param("kda", "inductor", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "lengths", [[13, 0, 22, 12, 1], pytest.param(None, marks=pytest.mark.slow)], ids=str
)
def test_layers(ranks, name, backend, lengths):
    ranks.run(check_layer, name, 2, lengths, True, backend, timeout=300)
