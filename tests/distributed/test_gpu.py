"""The same on two GPUs by NCCL, and in CUDA graphs."""

import pytest
import torch

from flaop.testing.context_parallel import check_capture, check_op
from flaop.testing.ranks import Ranks
from flaop.testing.summaries import SUMMARY_FAMILIES

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("context_parallel")]
LENGTHS = {"one sequence": None, "packed": [50, 0, 100, 42], "on the border": [96, 0, 95, 1, 0]}


@pytest.fixture(scope="module")
def gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = Ranks(2, "cuda")
    yield pool
    pool.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("family", SUMMARY_FAMILIES)
def test_values_and_gradients(gpus, family, lengths, dtype):
    options = {"K": 128, "V": 128, "dtype": dtype, "device": "cuda", "gates": "slow"}
    gpus.run(check_op, family, 2, lengths=LENGTHS[lengths], timeout=600, **options)


@pytest.mark.parametrize("family", SUMMARY_FAMILIES)
def test_capture(gpus, family):
    gpus.run(check_capture, family, timeout=600)


def test_compiled(gpus):
    options = {"device": "cuda", "lengths": LENGTHS["packed"]}
    gpus.run(check_op, "kda", 2, compiled="inductor", timeout=600, **options)
