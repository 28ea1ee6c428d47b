"""The cases of the suites at small sizes; targets and crossover on made-up records."""

from dataclasses import replace

import pytest

from flaop.bench import floors
from flaop.bench.accuracy import relative_errors
from flaop.bench.case import Shape, build_inputs, parse_shape
from flaop.bench.cli import JUDGED
from flaop.bench.contenders import load
from flaop.bench.decay_suite import DECAY_TARGETS, decay, gate_cost, judge_decay, state_bytes
from flaop.bench.decode_suite import DECODE_TARGETS, decode, judge_decode, step_label
from flaop.bench.delta_suite import DELTA_TARGETS, delta, judge_delta
from flaop.bench.flash_suite import FLASH_TARGETS
from flaop.bench.runner import new_record
from flaop.bench.suites import (
    FOUNDATION_TARGETS,
    TOKEN_LOOP,
    crossing,
    crossover,
    foundation,
    judge,
)

FIGURES = {
    "fwd bounded": {"eager_ms": 1.0, "peak_mib": 700, "host_us": 200, "first_call_s": 10},
    "fwdbwd bounded": {"eager_ms": 8.0, "peak_mib": 5000, "first_call_s": 35},
    "fwd softplus": {"eager_ms": 2.0},
    "fwdbwd softplus": {"eager_ms": 8.0},
    "step B256": {"graph_ms": 0.29},
    "step B32": {"graph_ms": 0.05},
}


def small(case):
    """The case on a CPU with everything but its kind cut down."""
    s = case.shape
    H, lengths = min(s.H, 2), None if s.lengths is None else (30, 5, 35)
    B, T = min(s.B, 2), min(s.T, 70)
    shape = Shape(B, T, H, H * (s.HV // s.H), 16, 16, lengths)
    pool = case.pool and "fp32"
    return replace(case, device="cpu", dtype="fp32", shape=shape, pool=pool)


@pytest.mark.parametrize("suite", JUDGED)
def test_every_case_is_right_at_a_small_size(suite):
    build, _ = JUDGED[suite]
    entries = build("cuda")
    assert len({entry.label for entry in entries}) == len(entries)
    for entry in entries:
        case = small(entry.case)
        inputs = build_inputs(case)
        assert floors.work(case, inputs)["floor_ms"] > 0
        errors = relative_errors(case, load("flaop", case.op), inputs)
        assert max(errors.values()) < 1e-4, entry.label


@pytest.mark.parametrize(
    ("suite", "targets"),
    [
        ("foundation", FOUNDATION_TARGETS),
        ("decay", DECAY_TARGETS),
        ("delta", DELTA_TARGETS),
        ("decode", DECODE_TARGETS),
        ("flash", FLASH_TARGETS),
    ],
)
def test_every_target_is_of_a_case(suite, targets):
    build, judge_suite = JUDGED[suite]
    entries = build("cuda")
    labels = {entry.label for entry in entries}
    assert {name for t in targets for name in (t.label, t.less)} - {None} <= labels
    firsts = {t.label for t in targets if t.figure == "first_call_s"}
    assert firsts <= {entry.label for entry in entries if entry.first_call}
    verdicts = judge_suite(entries, [])
    assert len({v.text for v in verdicts}) == len(verdicts) >= len(targets)
    assert judge_suite([], []) == []


def records(entries, figures):
    return [
        {**new_record(entry.case, "flaop"), **figures.get(entry.label, {})} for entry in entries
    ]


def lines(entries, found):
    return {v.text.split(":")[0]: v for v in judge(entries, found)}


def test_targets_without_a_peer_use_quoted_figures_and_say_so():
    entries = foundation("cuda")
    verdicts = lines(entries, records(entries, FIGURES))
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
    found = records(entries, FIGURES)
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


def test_targets_of_the_decay_families():
    entries = decay("cuda")
    found = records(entries, DECAY_FIGURES)
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
    verdicts = judge_decay(entries, records(entries, DECAY_FIGURES))
    assert len(verdicts) == 3 and not any("split" in v.text for v in verdicts)
    entries = [
        entry for entry in decay("cuda") if "split" in entry.label or "fwdbwd" in entry.label
    ]
    unmeasured = judge_decay(entries, [])
    assert len(unmeasured) == 7 and all(v.met is None for v in unmeasured)


def test_cost_of_a_gate_per_channel():
    entries = decay("cuda")
    assert gate_cost(entries, records(entries, DECAY_FIGURES)) == [
        "fwd: chunk_gla / chunk_simple_gla of flaop = 2.00",
        "fwdbwd: chunk_gla / chunk_simple_gla of flaop = 2.50",
    ]


DELTA_FIGURES = {
    "gdn fwd": {
        "eager_ms": 0.55, "graph_ms": 0.51, "host_us": 200, "peak_mib": 150, "first_call_s": 5,
    },
    "gdn fwd H64": {"eager_ms": 0.7, "graph_ms": 0.9},
    "gdn fwdbwd": {"eager_ms": 2.1, "first_call_s": 31},
    "delta fwd": {"host_us": 260, "first_call_s": 4},
    "delta fwdbwd": {"first_call_s": 20},
}  # fmt: skip


def test_targets_of_the_delta_families():
    entries = delta("cuda")
    found = records(entries, DELTA_FIGURES)
    verdicts = {v.text.split(":")[0]: v for v in judge_delta(entries, found)}
    gdn, rule = "chunk_gated_delta_rule", "chunk_delta_rule"
    assert {text: verdict.met for text, verdict in verdicts.items()} == {
        f"{gdn} forward, CUDA graph (ms)": False,
        f"{gdn} forward, eager (ms)": True,
        f"{gdn} forward, H64, eager (ms)": True,
        f"{gdn} forward + backward (ms)": False,
        f"{gdn}, peak without gradient (MiB)": True,
        f"{gdn}, host time of a call (us)": True,
        f"{gdn}, first call (s)": True,
        f"{gdn}, first call, backward added (s)": False,
        f"{rule}, host time of a call (us)": False,
        f"{rule}, first call (s)": True,
        f"{rule}, first call, backward added (s)": True,
    }
    assert verdicts[f"{gdn}, first call, backward added (s)"].value == 26


def test_cases_of_the_delta_suite():
    cases = {entry.label: entry.case for entry in delta("cuda")}
    assert cases["gdn fwd"].shape == parse_shape("B1T8192H16HV32K128V128")
    assert cases["gdn fwd packed"].shape.N == 6 and cases["gdn fwd packed"].shape.T == 8192
    assert cases["gdn step B32"].shape == parse_shape("B32T1H16HV32K128V128")
    # beta as it is, which every peer takes
    assert not cases["gdn fwd"].options["beta_sigmoid"]
    assert cases["gdn fwd fused"].options["beta_sigmoid"]


def test_targets_of_decode():
    entries = decode("cuda")
    figures = {
        step_label("kda", 32, 256, "fp32"): {"graph_ms": 0.28},
        step_label("kda", 32, 32, "fp32"): {"graph_ms": 0.041, "host_us": 15, "first_call_s": 1.0},
        step_label("gated_delta_rule", 32, 32, "bf16"): {"graph_ms": 0.023},
        "chunk_kda fwd": {"host_us": 130},
        "chunk_kda fwdbwd": {"first_call_s": 1.5},
    }
    found = records(entries, figures)
    verdicts = {v.text.split(":")[0]: v for v in judge_decode(entries, found)}
    assert {text: v.met for text, v in verdicts.items() if v.met is not None} == {
        "kda_step_, B256, fp32 pool, CUDA graph (ms)": True,
        "kda_step_, B32, fp32 pool, CUDA graph (ms)": False,
        "gated_delta_rule_step_, B32, bf16 pool, CUDA graph (ms)": True,
        "kda_step_, host time of a call (us)": True,
        "chunk_kda, host time of a call (us)": False,
        "first calls of chunk_kda forward + backward and of kda_step_ (s)": True,
    }


def test_cases_of_the_decode_suite():
    cases = {entry.label: entry.case for entry in decode("cuda")}
    case = cases[step_label("gated_delta_rule", 96, 8, "bf16")]
    assert case.shape == parse_shape("B8T1H48HV96K128V128") and case.state_v_first
    assert case.pool == "bf16" and case.options["beta_sigmoid"]
    assert not cases[step_label("kda", 32, 1, "fp32", "KV")].state_v_first
