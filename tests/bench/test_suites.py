"""The targets of the suites and the crossover, judged on made-up records."""

import pytest

from flaop.bench.decay_suite import decay, gate_cost, judge_decay, state_bytes
from flaop.bench.runner import new_record
from flaop.bench.suites import TOKEN_LOOP, crossing, crossover, foundation, judge

FIGURES = {
    "fwd bounded": {"eager_ms": 1.0, "peak_mib": 700, "host_us": 200, "first_call_s": 10},
    "fwdbwd bounded": {"eager_ms": 8.0, "peak_mib": 5000, "first_call_s": 35},
    "fwd softplus": {"eager_ms": 2.0},
    "fwdbwd softplus": {"eager_ms": 8.0},
    "step B256": {"graph_ms": 0.29},
    "step B32": {"graph_ms": 0.05},
}


def records(entries):
    made = []
    for entry in entries:
        made.append({**new_record(entry.case, "flaop"), **FIGURES.get(entry.label, {})})
    return made


def lines(entries, found):
    return {v.text.split(":")[0]: v for v in judge(entries, found)}


def test_targets_without_a_peer_use_quoted_figures_and_say_so():
    entries = foundation("cuda")
    verdicts = lines(entries, records(entries))
    forward = verdicts["forward, bounded gate, H96"]
    assert forward.met and forward.value == pytest.approx(2.63)
    assert "not the same run" in forward.text
    assert verdicts["forward, softplus gate, H96"].met is False
    assert verdicts["peak extra memory without gradient (MiB)"].met
    assert verdicts["peak extra memory, forward + backward (MiB)"].met is False
    assert verdicts["first call, backward added (s)"].value == 25
    assert verdicts["fused_recurrent_kda T = 1, B256 H32, CUDA graph (ms)"].met
    assert verdicts["fused_recurrent_kda T = 1, B32 H32, CUDA graph (ms)"].met is False
    assert verdicts["forward on the CPU against the token loop"].met is None


def test_a_peer_of_the_same_run_replaces_the_quoted_figure():
    entries = foundation("cuda")
    found = records(entries)
    peer = {**new_record(entries[0].case, "fla"), "eager_ms": 1.5}
    forward = lines(entries, [*found, peer])["forward, bounded gate, H96"]
    assert forward.met is False and forward.value == 1.5 and "same run" in forward.text


def test_without_a_gpu_only_the_cpu_line_is_judged():
    entries = foundation("cpu")
    assert [e.others for e in entries] == [(TOKEN_LOOP,)]
    fast, slow = (new_record(entries[0].case, name) for name in ("flaop", TOKEN_LOOP))
    fast["repeats"]["eager_ms"], slow["repeats"]["eager_ms"] = [3.0, 2.0], [12.0, 11.0]
    (verdict,) = judge(entries, [fast, slow])
    assert verdict.met and verdict.value == 5.5


def test_crossing_names_the_first_faster_length():
    entries = crossover("cpu", None, "fp32", ["fwd"], quick=False)
    times = {
        "chunk_kda": {512: 3, 1024: 3, 2048: 3},
        "fused_recurrent_kda": {512: 9, 1024: 9, 2048: 9},
    }
    times["scaled_dot_product_attention"] = {512: 1, 1024: 4, 2048: 8}
    found = []
    for entry in entries:
        contender = "torch" if entry.case.op.startswith("scaled") else "flaop"
        record = new_record(entry.case, contender)
        record["eager_ms"] = float(times[entry.case.op][entry.case.shape.T])
        found.append(record)
    assert crossing(found) == [
        "fwd: chunk_kda is faster than attention from T = 1024 on",
        "fwd: fused_recurrent_kda is faster than attention at no T up to 2048",
    ]


DECAY_FIGURES = {
    "simple_gla fwd": {"eager_ms": 0.5, "host_us": 200, "first_call_s": 10},
    "simple_gla fwdbwd": {"eager_ms": 2.0, "peak_mib": 1600},
    "simple_gla split": {"eager_ms": 2.4, "peak_mib": 1000},
    "gla fwd": {"eager_ms": 1.0, "host_us": 300, "first_call_s": 20},
    "gla fwdbwd": {"eager_ms": 5.0, "peak_mib": 2600},
    "gla split": {"eager_ms": 7.0, "peak_mib": 2500},
    "retention fwdbwd": {"eager_ms": 11.0},
}


def decay_records(entries):
    return [
        {**new_record(entry.case, "flaop"), **DECAY_FIGURES.get(entry.label, {})}
        for entry in entries
    ]


def test_targets_of_the_decay_families():
    entries = decay("cuda")
    found = decay_records(entries)
    verdicts = {v.text.split(":")[0]: v for v in judge_decay(entries, found)}
    forward = verdicts["chunk_simple_gla forward, H96"]
    assert forward.met is False and forward.value == pytest.approx(0.69 / 0.5)
    assert verdicts["chunk_gla forward, H96"].met
    assert verdicts["chunk_simple_gla forward + backward, H96 (ms)"].met
    assert verdicts["retention forward + backward, K256 (ms)"].met is False
    # no figure of fla's backward is quoted: fla itself must run
    assert verdicts["chunk_gla forward + backward, H96"].met is None
    assert verdicts["chunk_gla, host time of a call (us)"].met is False
    assert verdicts["chunk_simple_gla, first call (s)"].met
    # 2 x 128 chunks x 96 heads x 128 x 128 in bfloat16
    assert state_bytes(found[0]) == 768 * 2**20
    memory = "memory that split_size = 512 saves of chunk states and gradients"
    assert verdicts[f"chunk_simple_gla, {memory}"].value == pytest.approx(600 / 768)
    assert verdicts[f"chunk_simple_gla, {memory}"].met
    assert verdicts[f"chunk_gla, {memory}"].met is False
    time = "forward + backward, split_size = 512 against none"
    assert verdicts[f"chunk_simple_gla {time}"].value == pytest.approx(1.2)
    assert verdicts[f"chunk_gla {time}"].met is False


def test_decay_lines_that_were_left_out_are_not_judged():
    entries = [entry for entry in decay("cuda") if "fwdbwd" in entry.label]
    verdicts = judge_decay(entries, decay_records(entries))
    assert len(verdicts) == 3 and not any("split" in v.text for v in verdicts)
    entries = [
        entry for entry in decay("cuda") if "split" in entry.label or "fwdbwd" in entry.label
    ]
    unmeasured = judge_decay(entries, [])
    assert len(unmeasured) == 7 and all(v.met is None for v in unmeasured)


def test_cost_of_a_gate_per_channel():
    entries = decay("cuda")
    assert gate_cost(entries, decay_records(entries)) == [
        "fwd: chunk_gla / chunk_simple_gla of flaop = 2.00",
        "fwdbwd: chunk_gla / chunk_simple_gla of flaop = 2.50",
    ]
