"""`python -m flaop bench` on the CPU: what it writes, prints and refuses."""

import json
import os
import subprocess
import sys

import pytest

from flaop.bench import contenders, first_call, main
from flaop.bench.case import PRESETS, Case, parse_shape

RECORD = {
    "op", "mode", "shape", "dtype", "gates", "contender", "eager_ms", "graph_ms", "host_us",
    "peak_mib", "first_call_s", "rel_err", "note",
}  # fmt: skip
SMALL = ["--device", "cpu", "--quick", "--shape", "T80H1D16"]


def run(path, *arguments):
    status = main([*SMALL, "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


def test_json_has_the_record_format(tmp_path, capsys):
    status, data = run(tmp_path / "a.json", "--commit", "abc")
    assert status == 0
    assert {"device", "torch", "triton", "commit", "date", "records"} <= set(data)
    assert data["commit"] == "abc"
    (record,) = data["records"]
    assert set(record) >= RECORD
    assert record["shape"] == {"B": 1, "T": 80, "H": 1, "HV": 1, "K": 16, "V": 16, "N": 1}
    assert (record["op"], record["mode"], record["contender"]) == ("chunk_kda", "fwd", "flaop")
    assert record["eager_ms"] > 0 and 0 < record["rel_err"] < 1e-4
    assert [record[name] for name in ("graph_ms", "host_us", "peak_mib", "first_call_s")] == [
        None
    ] * 4
    assert len(record["repeats"]["eager_ms"]) >= 3
    assert record["bytes"] > 0 and record["flops"] > 0 and record["floor_ms"] is None
    assert "chunk_kda" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_products_of_arguments(tmp_path):
    arguments = ["--gates", "fast", "slow", "--mode", "fwd", "fwdbwd", "--op", "kda"]
    status, data = run(tmp_path / "a.json", *arguments, "--gate-kind", "precomputed")
    assert status == 0
    found = {(r["gates"], r["mode"]) for r in data["records"]}
    assert found == {("fast", "fwd"), ("fast", "fwdbwd"), ("slow", "fwd"), ("slow", "fwdbwd")}


def test_decay_ops_and_their_splits(tmp_path, capsys):
    arguments = ["--op", "chunk_gla", "chunk_retention", "--mode", "fwdbwd", "--shape", "T200H1D16"]
    status, data = run(tmp_path / "a.json", *arguments, "--split-size", "0", "64")
    assert status == 0
    found = [(r["op"], r["split_size"], r["gate_kind"]) for r in data["records"]]
    ops = ("chunk_gla", "chunk_retention")
    assert found == [(op, n, "precomputed") for n in (0, 64) for op in ops]
    assert max(r["rel_err"] for r in data["records"]) < 1e-5
    out = capsys.readouterr().out
    assert "fp32 split 64" in out and "constant" in out
    step = ["--device", "cpu", "--quick", "--mode", "step", "--shape", "B2T1H1D16"]
    assert main([*step, "--op", "fused_recurrent_gla", "simple_gla", "retention"]) == 0


def test_decay_suite_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "cpu", "B1T100H1D16")
    assert main(["--device", "cpu", "--suite", "decay", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "chunk_gla / chunk_simple_gla of flaop = " in out
    assert "targets: none for these cases" in out


def test_delta_suite_on_the_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "cpu", "B1T100H1D16")
    status, data = run(tmp_path / "a.json", "--suite", "delta")
    assert status == 0 and "targets: none for these cases" in capsys.readouterr().out
    found = [(r["op"], r["contender"], r["gate_kind"]) for r in data["records"]]
    assert found == [
        (op, contender, "precomputed")
        for op in ("chunk_gated_delta_rule", "chunk_delta_rule")
        for contender in ("flaop", "token loop")
    ]


def test_delta_ops_and_their_gates(tmp_path, capsys):
    ops = ["--op", "chunk_gated_delta_rule", "delta_rule", "--mode", "fwdbwd"]
    status, data = run(tmp_path / "a.json", *ops, "--shape", "T100H1HV2D16")
    assert status == 0 and max(r["rel_err"] for r in data["records"]) < 1e-4
    out = capsys.readouterr().out
    assert "mixed precomputed" in out and "none" in out
    raw = ["--op", "gated_delta_rule", "--gate-kind", "softplus"]
    status, data = run(tmp_path / "a.json", *raw)
    assert status == 0 and data["records"][0]["inputs"]["beta_sigmoid"]


def test_step_and_packed(tmp_path):
    step = ["--device", "cpu", "--quick", "--mode", "step", "--shape", "B2T1H1D16"]
    assert main(step) == 0
    status, data = run(tmp_path / "a.json", "--lengths", "30,50")
    assert status == 0 and data["records"][0]["shape"]["N"] == 2


def test_crossover_has_three_contenders_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flaop.bench.suites.CROSSOVER_T_CPU", (16, 32, 64))
    picture = tmp_path / "a.png"
    arguments = ["--device", "cpu", "--suite", "crossover", "--shape", "T1H1D16"]
    assert main([*arguments, "--first-call", "none", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "fwd: chunk_kda is faster than attention" in out
    assert "attention" in out and "fused_recurrent_kda" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_failing_case_is_a_note_and_the_others_run(tmp_path, monkeypatch):
    real = contenders.load

    def load(contender, op):
        if op == "kda":
            raise RuntimeError("no such kernel")
        return real(contender, op)

    monkeypatch.setattr("flaop.bench.runner.load", load)
    status, data = run(tmp_path / "a.json", "--op", "kda", "chunk_kda")
    assert status == 1
    bad, good = data["records"]
    assert bad["status"] == "failed" and "no such kernel" in bad["note"]
    assert bad["eager_ms"] is None and good["eager_ms"] > 0


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    real = contenders.load("flaop", "chunk_kda")

    def wrong(**inputs):
        o, state = real(**inputs)
        return o * float("nan"), state

    monkeypatch.setattr("flaop.bench.runner.load", lambda *_: wrong)
    status, data = run(tmp_path / "a.json")
    assert status == 1
    assert data["records"][0]["eager_ms"] is None
    assert data["records"][0]["rel_err"] is None
    assert "wrong result" in data["records"][0]["note"]


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule"])
def test_a_backward_that_a_peer_refuses_is_a_note(op, monkeypatch):
    from flaop.bench.runner import Settings, run_case

    def load(*_):
        def refuse(**inputs):
            raise RuntimeError("not on this triton")

        return refuse

    monkeypatch.setattr("flaop.bench.runner.load", load)
    case = Case(op, "fwdbwd", parse_shape("T8H1D16"), "fp32", "mixed", "precomputed", "cpu")
    record = run_case(case, "flash_qla", Settings(quick=True, first_call=True))
    assert record["status"] == "unavailable" and record["eager_ms"] is None
    assert record["note"] == "RuntimeError: not on this triton"


def test_a_peer_that_fails_is_unavailable(tmp_path, monkeypatch):
    from flaop.bench.runner import Settings, run_case

    def load(*_):
        raise contenders.Unavailable("not here")

    monkeypatch.setattr("flaop.bench.runner.load", load)
    case = Case("chunk_kda", "fwd", parse_shape("T8H1D16"), "fp32", "mixed", "bounded", "cpu")
    record = run_case(case, "fla", Settings(quick=True))
    assert record["status"] == "unavailable" and record["note"] == "not here"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device tpu"),
        (["--device", "meta"], "use cpu, cuda or cuda:N"),
        (["--shape", "nonsense"], "not of the form"),
        (["--mode", "step", "--shape", "T2H1D16"], "needs T1"),
        (["--op", "crossover", "kda"], "stands alone"),
        (["--suite", "crossover", "--shape", "T8H1HV2D16"], "HV = H"),
        (["--suite", "foundation", "--device", "cpu", "--only", "zzz"], "no case"),
        (["--lengths", "4,x"], "--lengths"),
        (["--op", "gla", "--gate-kind", "softplus"], "gla has no softplus gate in its kernel"),
        (["--op", "gated_delta_rule", "--gate-kind", "bounded"], "is precomputed or softplus"),
        (["--split-size", "64"], "chunk_kda has no split_size"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_a_missing_gpu_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2
    assert "sees no GPU" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([*SMALL, "--json", str(tmp_path / "file" / "a.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
    from flaop.bench import report

    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ValueError):
        report.write_json(path, {}, [{"value": float("nan")}])
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_first_call_runs_in_a_fresh_process():
    case = Case("chunk_kda", "fwd", parse_shape("T8H1D16"), "fp32", "mixed", "bounded", "cpu")
    assert 0 < first_call.measure(case, "flaop", 300) < 60


def test_first_call_says_why_there_is_no_figure():
    case = Case("chunk_kda", "fwd", parse_shape("T8H1D16"), "fp32", "mixed", "bounded", "cpu")
    with pytest.raises(contenders.Unavailable, match="longer than 0 s"):
        first_call.measure(case, "flaop", 0.01)


def test_importing_the_benchmark_imports_no_peer():
    code = (
        "import sys, flaop.bench; "
        "print([m for m in ('triton', 'matplotlib', 'fla', 'flash_qla') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]", done.stderr
