"""The example and the benchmark of context parallelism."""

import json
import subprocess
import sys

import pytest

from flaop.demo import context_parallel as demo
from flaop.testing.context_parallel import run_bench, run_demo

TINY = ("--size", "tiny", "--steps", "3", "--batch", "4")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]


def test_training(ranks):
    losses = ranks.run(run_demo, *TINY, "--cp", "2")
    assert len({*losses}) == 1 and 4 < losses[0] < 9


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_ranks_of_a_sequence(ranks):
    losses = [ranks.run(run_demo, *TINY, "--cp", cp)[0] for cp in ("4", "2", "1")]
    assert max(losses) - min(losses) < 1e-4


def test_sizes_that_do_not_fit_are_refused(ranks):
    with pytest.raises(AssertionError, match="--cp must divide the number of ranks, 4, got 3"):
        ranks.run(run_demo, *TINY, "--cp", "3")


def test_without_torchrun(capsys):
    assert demo.main([]) == 2
    assert "start it by torchrun" in capsys.readouterr().err


def test_bench(ranks):
    for op, mode in (("chunk_kda", "fwdbwd"), ("chunk_gla", "fwd")):
        records = ranks.run(run_bench, op, mode)
        assert len({r["eager_ms"] for r in records}) == 1  # of the slowest
        record = records[0]
        assert record["rel_err"] < 1e-5 and record["ranks"] == 4
        assert min(record[name] for name in ("eager_ms", "single_ms", "all_gather_ms")) > 0
        assert "4 ranks" in record["note"]


@pytest.mark.slow
def test_torchrun(tmp_path):
    run = [*TORCHRUN, "flaop.demo.context_parallel", *TINY, "--device", "cpu", "--compile"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0 and "step 3: " in done.stdout, done.stderr
    path = tmp_path / "cp.json"
    run = [*TORCHRUN, "flaop", "bench", "--cp", "--quick", "--device", "cpu", "--json", path]
    run += ["--shape", "B1T256H2K16V16"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["records"][0]["ranks"] == 2
