"""What both demos share: device, compiler, interrupts, checkpoint, one-sentence errors."""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import sys
import threading

import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from flaop.nn import HybridConfig, HybridModel


class DemoError(Exception):
    """Something the user can put right, said in one sentence."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def op_name(node: torch.fx.Node) -> str:
    """The operator that a node calls, as `flaop.chunk_kda`."""
    wrapped = str(node.target).startswith("auto_functionalized")  # around an op that mutates
    return str(node.args[0] if wrapped else node.target).removesuffix(".default")


class GraphRecorder:
    """The Inductor backend of torch.compile, noting the flaop ops of every graph it compiles."""

    def __init__(self):
        self.ops = collections.Counter()
        self.graphs = 0
        torch._dynamo.utils.counters["graph_break"].clear()

    def __call__(self, graph_module, inputs):
        self.graphs += 1
        # a hit in this cache would skip the stage at which the ops are noted
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph_module, inputs, inner_compile=self._compile)

    def _compile(self, graph_module, inputs, **kwargs):
        names = (op_name(n) for n in graph_module.graph.nodes if n.op == "call_function")
        self.ops.update(name for name in names if name.startswith("flaop."))
        return compile_fx_inner(graph_module, inputs, **kwargs)

    def report(self) -> str:
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        ops = ", ".join(f"{name} x{count}" for name, count in sorted(self.ops.items()))
        return f"graph breaks: {breaks}\nflaop ops in the {self.graphs} graphs: {ops or 'none'}"


class Interrupt:
    """Turns the first Ctrl-C into a flag, so that a step is finished; the second one raises."""

    def __init__(self):
        self.asked = False

    def __enter__(self):
        # only the main thread can set a handler; elsewhere Ctrl-C does not arrive either
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_):
        if self._main:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, *_):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step (Ctrl-C again: at once)", file=sys.stderr, flush=True)


@contextlib.contextmanager
def one_sentence_errors(device: torch.device):
    """Turns running out of memory into a DemoError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise DemoError(_too_large(device)) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise DemoError(_too_large(device)) from error


def _too_large(device: torch.device) -> str:
    return f"not enough memory on {device}: take a smaller --size or --batch"


def resolve_device(name: str | None) -> torch.device:
    """The device of that name, or the best one there is; checks that it can be used."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DemoError(f"unknown device {name!r}: use cpu, cuda or cuda:<index>", 2) from None
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f"the demo runs on cpu and cuda, not on {name!r}", 2)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise DemoError(f"device {name!r} is not there: {count} CUDA devices are visible")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def check_compiler(device: torch.device) -> None:
    """torch.compile needs a C++ compiler on CPU, and a C compiler for Triton on CUDA."""
    if device.type == "cuda":
        names = [os.environ.get("CC"), "gcc", "clang", "cc"]
        if not any(name and shutil.which(name) for name in names):
            raise DemoError("no C compiler found: torch.compile needs gcc or clang (or set CC)")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise DemoError(
            "no C++ compiler found: torch.compile needs g++ or clang++ (or set CXX)"
        ) from None


def check_memory(device: torch.device, needed: int) -> None:
    """Compares a rough need in bytes with what is free."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = _available_memory()
    if free is not None and needed > free:
        raise DemoError(
            f"this size needs about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free "
            f"on {device}: take a smaller --size or --batch"
        )


def _available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not say."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_output(path: pathlib.Path) -> None:
    """Fails before the training, not after it, if the checkpoint could not be written."""
    folder = path.parent
    if path.is_dir():
        raise DemoError(f"--output {path} is a folder, not a file", 2)
    if not folder.is_dir():
        raise DemoError(f"the folder {folder} of --output does not exist", 2)
    if not os.access(folder, os.W_OK):
        raise DemoError(f"the folder {folder} of --output cannot be written to")


def progress_bar(total: int, description: str):
    try:
        from tqdm import tqdm
    except ImportError:
        raise DemoError("the demo needs tqdm: pip install tqdm") from None
    return tqdm(total=total, desc=description, dynamic_ncols=True, mininterval=0.5)


def save_checkpoint(model: HybridModel, path: pathlib.Path, step: int) -> None:
    """Writes parameters and configuration; an older file stays whole until the new one is."""
    config = json.dumps(dataclasses.asdict(model.config))
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _safetensors().torch.save_file(tensors, temporary, {"config": config, "step": str(step)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        raise DemoError(f"cannot write the checkpoint {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: pathlib.Path, device: torch.device) -> HybridModel:
    """Rebuilds the model from a checkpoint of save_checkpoint."""
    with _safetensors().safe_open(path, "pt", device=str(device)) as file:
        config = HybridConfig(**json.loads(file.metadata()["config"]))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    with torch.device(device):
        model = HybridModel(config)
    model.load_state_dict(tensors)
    return model


def _safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise DemoError("the demo needs safetensors: pip install safetensors") from None
    return safetensors
