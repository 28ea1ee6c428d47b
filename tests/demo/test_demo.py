"""`python -m flaop demo`: a short run of everything, its tables, and how it says what is wrong."""

import json
import math
import os
import re
import signal

import pytest
import torch
from safetensors import safe_open

from flaop.__main__ import main as command
from flaop.demo import corpus, main, runtime, text, training
from flaop.nn import HybridConfig, HybridModel

TINY = HybridConfig(hidden_size=16, num_layers=1, layers=("attention",), num_heads=1, head_dim=8)


def test_everything_in_a_short_run(device, tmp_path, capsys):
    output = tmp_path / "model.safetensors"
    arguments = ["--size", "tiny", "--layers", "2", "--steps", "2", "--tokens", "4"]
    code = main([*arguments, "--device", device, "--output", str(output)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    lines = shown.out.splitlines()
    assert "graph breaks: 0" in lines
    # training, evaluation (the reloaded model too) and decode
    (ops,) = (line for line in lines if line.startswith("flaop ops in the 3 graphs"))
    for name in ("chunk_kda x", "chunk_kda_fwd x", "chunk_kda_bwd x", "kda_step_ x"):
        assert f"flaop.{name}" in ops
    loss = re.search(
        r"validation loss +([\d.]+) bits per byte, after the reload ([\d.]+)", shown.out
    )
    assert loss.group(1) == loss.group(2)
    tables = [
        float(re.search(rf"{n} table +([\d.]+)", shown.out)[1]) for n in ("unigram", "bigram")
    ]
    assert 4.0 < tables[0] < 5.0 and 2.5 < tables[1] < tables[0]
    difference = re.search(r"relative difference of the logits ([\d.e+-]+)", shown.out)
    assert float(difference[1]) < (1e-4 if device == "cpu" else 5e-2)
    assert "tokens/s" in shown.err
    modes = ["eager", "compiled"] + ["captured"] * (device == "cuda")
    for mode in modes:
        assert re.search(rf"decode, tokens/s: .*{mode} [\d,.]+", shown.out)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(output, "pt") as file:
        assert json.loads(file.metadata()["config"])["num_layers"] == 2


OPS = {
    "gla": "gla",
    **dict.fromkeys(("retention", "lightning", "mamba2"), "simple_gla"),
    **dict.fromkeys(("gdn", "deltanet"), "gated_delta_rule"),
}


@pytest.mark.parametrize(
    "kind", [k if k == "gla" else pytest.param(k, marks=pytest.mark.slow) for k in OPS]
)
def test_other_layers(device, tmp_path, capsys, kind):
    output = tmp_path / "model.safetensors"
    size = ["--size", "tiny", "--depth", "1", "--steps", "2", "--tokens", "2"]
    assert main([*size, "--layers", kind, "--device", device, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert f"; {kind}, " in shown and "graph breaks: 0" in shown
    for name in (f"chunk_{OPS[kind]}_fwd", f"chunk_{OPS[kind]}_bwd", f"{OPS[kind]}_step_"):
        assert f"flaop.{name} x" in shown
    loss = re.search(r"validation loss +([\d.]+) bits per byte, after the reload ([\d.]+)", shown)
    assert loss.group(1) == loss.group(2)
    difference = re.search(r"relative difference of the logits ([\d.e+-]+)", shown)
    assert float(difference[1]) < (1e-4 if device == "cpu" else 5e-2)
    assert runtime.load_checkpoint(output, torch.device("cpu")).config.layers[0] == kind


def test_layers_take_a_kind_or_a_number(monkeypatch, capsys):
    seen = []

    def stop(config):
        seen.append(config.layer_names())
        raise MemoryError

    monkeypatch.setattr(text, "HybridModel", stop)
    for arguments in ([], ["2"], ["mamba2"], ["retention", "--depth", "5"]):
        arguments = ["--layers"] * bool(arguments) + arguments
        assert main(["--device", "cpu", "--size", "tiny", *arguments]) == 1
    assert seen == [
        ["kda", "kda", "kda", "attention"],
        ["kda"] * 2,
        ["mamba2", "mamba2", "mamba2", "attention"],
        ["retention", "retention", "retention", "attention", "retention"],
    ]
    with pytest.raises(SystemExit) as error:
        main(["--layers", "attention"])
    assert error.value.code == 2
    assert "'attention' is neither one of kda, gla, " in capsys.readouterr().err


def test_files_are_split_the_same_way_every_time(tmp_path):
    for i in range(40):
        (tmp_path / f"m{i}.py").write_text(f"x = {i}\n")
    for skipped in ("test", "site-packages/sub"):
        (tmp_path / skipped).mkdir(parents=True)
        (tmp_path / skipped / "no.py").write_text("never read")
    first, second = corpus.load(tmp_path), corpus.load(tmp_path)
    assert torch.equal(first.train, second.train) and first.files == 40
    parts = [set(bytes(t.tolist()).split(b"\0")) for t in (first.train, first.validation)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {f"x = {i}\n".encode() for i in range(40)}
    with pytest.raises(runtime.DemoError, match="no Python source files"):
        corpus.load(tmp_path / "nothing")


def test_tables_by_hand():
    train = torch.tensor([0, 1, 0, 1, 0], dtype=torch.uint8)
    batch = torch.tensor([[0, 1, 0], [1, 1, 0]], dtype=torch.uint8)
    unigram = [3 / 261, 4 / 261, 3 / 261, 4 / 261]  # of 1, 0, 1, 0
    bigram = [3 / 258, 3 / 258, 1 / 258, 3 / 258]  # of 0->1, 1->0, 1->1, 1->0
    for loss, table in ((corpus.unigram_loss, unigram), (corpus.bigram_loss, bigram)):
        assert loss(train, batch) == pytest.approx(-sum(map(math.log2, table)) / 4)


def test_windows_cover_the_text():
    got = corpus.windows(torch.arange(100, dtype=torch.uint8), 4, 10)
    assert got[:, 0].tolist() == [0, 30, 60, 90] and got[:, -1].tolist() == [9, 39, 69, 99]


def run_training(finished=None, steps=8, seconds=1e9):
    model = HybridModel(TINY)
    return training.train(
        model,
        lambda batch: text._loss(model, batch),
        lambda: torch.randint(256, (2, 9)),
        training.Schedule(steps, seconds, 1e-3),
        dtype=torch.float32,
        unit=1.0,
        unit_name="loss",
        finished=finished,
    )


def test_training_ends():
    assert run_training() == (8, False)
    assert run_training(lambda step: step == 5) == (5, False)
    assert run_training(seconds=1e-9).steps == 2


def test_interrupt_finishes_the_step():
    previous = signal.getsignal(signal.SIGINT)
    assert run_training(lambda step: step == 3 and os.kill(os.getpid(), signal.SIGINT)) == (3, True)

    def twice(step):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    assert run_training(twice) == (1, True)
    assert signal.getsignal(signal.SIGINT) is previous


def test_interrupted_demo_leaves_a_checkpoint(tmp_path, monkeypatch, capsys):
    output = tmp_path / "model.safetensors"
    monkeypatch.setattr(
        text, "train", lambda *args, **kwargs: training.Outcome(steps=7, interrupted=True)
    )
    assert main(["--device", "cpu", "--size", "tiny", "--output", str(output)]) == 130
    assert "checkpoint after 7 steps" in capsys.readouterr().out
    assert runtime.load_checkpoint(output, torch.device("cpu")).config.num_layers == 4

    # before the first step there is nothing worth an older checkpoint
    before = output.read_bytes()
    monkeypatch.setattr(text, "train", lambda *args, **kwargs: training.Outcome(0, True))
    assert main(["--device", "cpu", "--size", "tiny", "--output", str(output)]) == 130
    assert "nothing is saved" in capsys.readouterr().err and output.read_bytes() == before


def test_checkpoint_is_whole_or_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    model = HybridModel(TINY)
    runtime.save_checkpoint(model, path, 1)
    loaded = runtime.load_checkpoint(path, torch.device("cpu"))
    assert loaded.config == TINY
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    before = path.read_bytes()

    def full_disk(tensors, temporary, metadata):
        temporary.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(runtime.DemoError, match="No space left on device"):
        runtime.save_checkpoint(model, path, 2)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "arguments, code, sentence",
    [
        (["--device", "tpu9"], 2, "unknown device 'tpu9'"),
        (["--device", "mps"], 2, "runs on cpu and cuda, not on 'mps'"),
        (["--device", "cuda:99"], 1, "device 'cuda:99' is not there"),
        (["--steps", "0"], 2, "--steps must be positive, got 0"),
        (["--layers", "0"], 2, "--layers must be positive, got 0"),
        (["--layers", "gla", "--depth", "-1"], 2, "--depth must be positive, got -1"),
        (["--layers", "2", "--depth", "3"], 2, "--layers 2 and --depth 3 exclude each other"),
        (["--seconds", "nan"], 2, "--seconds must be positive, got nan"),
        (["--output", "/nonexistent/x"], 2, "folder /nonexistent of --output does not exist"),
        (["--output", "/"], 2, "is a folder"),
        (["--batch", "100000000"], 1, "this size needs about"),
        (["recall", "--pairs", "0"], 2, "--pairs must be positive, got 0"),
        (["recall", "--length", "12"], 2, "need more than 16 tokens, got 12"),
        (["recall", "--keys", "3"], 2, "need as many different keys, not 3"),
        (["recall", "--size", "1024"], 2, "--size must be even and at most 512, got 1024"),
    ],
)
def test_one_sentence_for_what_is_wrong(arguments, code, sentence, capsys):
    if "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    if "recall" in arguments and "--pairs" not in arguments:
        arguments = [*arguments, "--pairs", "8"]
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert sentence in shown.err and len(shown.err.splitlines()) == 1 and not shown.out


def test_missing_compiler(capsys):
    with torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/g++",)}):
        assert main(["--device", "cpu"]) == 1
    assert "no C++ compiler found" in capsys.readouterr().err


def test_out_of_memory_is_one_sentence(monkeypatch, capsys, tmp_path):
    def exhausted(*args, **kwargs):
        return torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(text, "train", exhausted)
    output = tmp_path / "model.safetensors"
    assert main(["--device", "cpu", "--size", "tiny", "--output", str(output)]) == 1
    assert "not enough memory on cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_wrong_arguments(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--size", "huge"])
    assert error.value.code == 2
    assert command(["frobnicate"]) == 2
    assert "unknown command 'frobnicate'" in capsys.readouterr().err
    assert command([]) == 2
    assert command(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
