"""`python -m flaop doctor`: what it says, and that a broken installation is a sentence."""

import subprocess
import sys

import pytest
import torch

from flaop import doctor
from flaop._extension import bindings


def output_of(section):
    return "\n".join(section())


def test_a_working_installation_exits_0(capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    for title in doctor.SECTIONS:
        assert f"\n{title}\n" in f"\n{out}"
    assert "everything works" in out and "BROKEN" not in out
    assert f"torch {torch.__version__}" in out
    state = "built" if bindings.FLASH_KDA_BUILT else "not built"
    assert f"flash_kda): {state}\n" in out
    assert "flaop::chunk_kda_bwd" in out


def test_it_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "flaop", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "everything works" in done.stdout


def test_paths_show_each_choice_with_its_reason():
    text = output_of(doctor.paths)
    assert "cpu: decode, one token with a state: fused_recurrent" in text
    assert "cpu: prefill of 2048 tokens, softplus gate: chunk" in text
    assert "cpu: training, 32 tokens: chunk" in text
    assert "a gradient is needed" in text


def test_every_op_has_all_kernels():
    for name, has in doctor.registered().items():
        kernels = [has[kind] for kind in ("fake", *doctor.KEYS)]
        assert has["composite"] or all(kernels), name


def test_a_missing_kernel_is_named(monkeypatch, capsys):
    complete = doctor.registered()
    complete["flaop::chunk_kda"]["CUDA"] = False
    monkeypatch.setattr(doctor, "registered", lambda: complete)
    assert doctor.report("ops", doctor.ops) == "ops: flaop::chunk_kda has no CUDA kernel"
    assert "BROKEN" in capsys.readouterr().out


def test_a_wrong_result_is_broken(monkeypatch):
    import flaop

    def chunk_kda(**inputs):
        o, state = flaop.fused_recurrent_kda(**inputs)
        return o * 1.01, state

    monkeypatch.setattr(flaop, "chunk_kda", chunk_kda)
    with pytest.raises(doctor.Broken, match="largest relative error"):
        output_of(doctor.self_test)


def test_one_wrong_gradient_is_broken(monkeypatch):
    import flaop

    real = flaop.chunk_kda

    def chunk_kda(**inputs):
        beta = inputs.pop("beta")
        return real(**inputs, beta=2 * beta.detach() - beta)

    monkeypatch.setattr(flaop, "chunk_kda", chunk_kda)
    with pytest.raises(doctor.Broken, match="gradient of beta"):
        output_of(doctor.self_test)


def test_a_section_that_fails_leaves_the_others(monkeypatch, capsys):
    def broken():
        yield "first line"
        raise RuntimeError("lost a library\nsecond line")

    sections = {"broken": broken, "devices": doctor.devices}
    monkeypatch.setattr(doctor, "SECTIONS", sections)
    assert doctor.main([]) == 1
    printed = capsys.readouterr()
    assert "CPU," in printed.out and "Traceback" not in printed.out + printed.err
    assert printed.err.strip() == "flaop doctor: broken: RuntimeError: lost a library"


def test_a_missing_extension_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flaop", None)
    assert doctor.main([]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_without_triton_a_gpu_machine_is_broken(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not needed" in output_of(doctor.toolchain)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(doctor.Broken, match="triton is not installed"):
        output_of(doctor.toolchain)
