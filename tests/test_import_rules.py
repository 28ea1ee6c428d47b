"""Who may import whom, and what importing flaop may cause."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
STDLIB = set(sys.stdlib_module_names)

# (folder or file, what it may import beside the standard library, what only inside a function)
LAYERS = [
    ("triton_kernels", {"triton", "flaop.triton_kernels"}, set()),
    (
        "flaop/launch",
        {"torch", "flaop.triton_kernels", "flaop.launch", "flaop._extension", "flaop._version"},
        {"triton"},
    ),
    ("flaop/reference", {"torch", "flaop.reference"}, set()),
    ("flaop/validation", {"torch", "flaop.validation"}, set()),
    (
        "flaop/ops",
        {"torch", "flaop.validation", "flaop.ops"},
        {"flaop.launch", "flaop.reference"},
    ),
    ("flaop/distributed", {"torch", "flaop.validation", "flaop.distributed"}, set()),
    ("flaop/functional.py", {"torch", "flaop._paths"}, set()),
    ("flaop/functional_decay.py", {"torch", "flaop._paths"}, set()),
    ("flaop/functional_decay_steps.py", {"torch"}, set()),
    ("flaop/functional_delta_rule.py", {"torch", "flaop._paths"}, set()),
    ("flaop/functional_delta_stages.py", {"torch"}, set()),
    ("flaop/functional_gated_delta_rule.py", {"torch", "flaop._paths"}, set()),
    ("flaop/functional_gated_delta_rule_steps.py", {"torch"}, set()),
    ("flaop/functional_linear.py", {"torch", "flaop._paths"}, set()),
    ("flaop/functional_mamba2.py", {"torch", "flaop.functional_decay"}, set()),
    ("flaop/functional_retention.py", {"torch", "flaop._paths"}, set()),
    ("flaop/functional_stages.py", {"torch"}, set()),
    ("flaop/functional_steps.py", {"torch"}, set()),
    (
        "flaop/integrations",
        {"torch", "flaop.functional", "flaop.functional_gated_delta_rule"},
        {"transformers"},
    ),
    ("flaop/_paths.py", {"torch", "flaop._extension", "flaop._version"}, set()),
    ("flaop/_extension.py", {"torch", "flaop._bindings"}, set()),
]
# Of flaop/launch, which imports it where it has to compile.
COMPILER = "compile.py"
# Names that functions of flaop own.
FUNCTION_NAMES = (
    *("kda", "gla", "simple_gla", "gated_delta_rule", "retention", "lightning_attn"),
    *("linear_attn", "mamba2_ssd", "delta_rule", "gdn", "explain", "supports", "backend"),
)


def python_files(path: str) -> list[pathlib.Path]:
    return [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py"))


def module_name(file: pathlib.Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "triton_kernels":
        parts.insert(0, "flaop")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: pathlib.Path) -> list[tuple[str, bool]]:
    """Absolute names that a file imports, and whether inside a function."""
    tree = ast.parse(file.read_text())
    package = (
        module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    )
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from flaop import x` may import a module.
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "flaop" else [base]
        else:
            continue
        found += [(name, id(node) in inside) for name in names]
    return found


def allowed(name: str, prefixes: set[str]) -> bool:
    return name.split(".")[0] in STDLIB or any(
        name == prefix or name.startswith(prefix + ".") for prefix in prefixes
    )


@pytest.mark.parametrize("path, anywhere, in_functions", LAYERS, ids=[x[0] for x in LAYERS])
def test_python_layers(path, anywhere, in_functions):
    files = python_files(path)
    assert files
    for file in files:
        for name, inside in imports(file):
            permitted = anywhere | in_functions if inside or file.name == COMPILER else anywhere
            assert allowed(name, permitted), f"{file.relative_to(ROOT)} imports {name}"


def test_the_bare_name_of_the_kernels_is_never_imported():
    for folder in ("flaop", "tests", "triton_kernels", "benchmarks"):
        for file in python_files(folder):
            for name, _ in imports(file):
                assert name.split(".")[0] != "triton_kernels", file


def test_no_module_takes_the_name_of_a_function():
    for name in FUNCTION_NAMES:
        assert not (ROOT / "flaop" / f"{name}.py").exists()
        assert not (ROOT / "flaop" / name).exists()


def includes(folder: str) -> list[tuple[pathlib.Path, str]]:
    pattern = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
    files = [f for f in (ROOT / folder).rglob("*") if f.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return [(file, name) for file in files for name in pattern.findall(file.read_text())]


TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/")


@pytest.mark.parametrize("folder", ["csrc/dispatch", "csrc/kernels", "csrc/launch"])
def test_what_knows_no_tensor_includes_no_torch_header(folder):
    for file, name in includes(folder):
        assert not TORCH_HEADER.match(name), f"{file.relative_to(ROOT)} includes {name}"
        assert "ops/" not in name, f"{file.relative_to(ROOT)} includes {name}"


def test_ops_include_no_other_family():
    families = {file.stem for file in (ROOT / "csrc/ops").glob("*.cpp")}
    for file, name in includes("csrc/ops"):
        header = pathlib.PurePath(name)
        assert header.stem not in families - {file.stem}, f"{file.name} includes {name}"
        assert not name.startswith("cuda"), f"{file.name} includes {name}"


def run(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **options
    )


def test_cold_import(tmp_path):
    """No triton, no CUDA context, no kernel module, no model or tool."""
    result = run(
        "import sys, flaop, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "heavy = [m for m in sys.modules if m == 'triton' or m.startswith(('triton.', "
        "'triton_kernels', 'flaop.triton_kernels', 'flaop.launch', 'flaop.reference', "
        "'flaop.nn', 'flaop.testing', 'flaop.demo', 'flaop.bench', 'flaop.distributed'))]\n"
        "assert not heavy, heavy",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr


def test_the_cpu_path_needs_no_triton(tmp_path):
    result = run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, flaop\n"
        "x = torch.rand(1, 70, 1, 16, requires_grad=True)\n"
        "flaop.kda(x, x, x, -x, x[..., 0])[0].sum().backward()\n"
        "assert x.grad is not None",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr


def test_kernels_are_installed_inside_flaop(tmp_path):
    result = run("import flaop.triton_kernels.configs; print(flaop.__file__)", cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def bare_copy(tmp_path):
    """The package without what the build leaves in it."""
    ignore = shutil.ignore_patterns("*.so", "_build.json", "__pycache__")
    shutil.copytree(ROOT / "flaop", tmp_path / "flaop", ignore=ignore)
    return tmp_path


def test_missing_extension_says_how_to_build(bare_copy):
    result = run("import flaop", cwd=bare_copy)
    assert "ImportError: flaop's compiled extension is missing" in result.stderr
    assert "pip install --no-build-isolation -e ." in result.stderr


def test_extension_of_another_torch_is_not_opened(bare_copy):
    (bare_copy / "flaop" / "_C.so").write_bytes(b"")
    (bare_copy / "flaop" / "_build.json").write_text('{"torch": "1.0.0"}')
    result = run("import flaop", cwd=bare_copy)
    assert "ImportError: flaop's compiled extension was built for torch 1.0.0" in result.stderr


def test_a_command_without_the_extension_ends_with_a_sentence(bare_copy):
    command = [sys.executable, "-m", "flaop", "doctor"]
    result = subprocess.run(command, cwd=bare_copy, capture_output=True, text=True)
    assert result.returncode == 1
    assert "compiled extension is missing" in result.stderr
    assert "Traceback" not in result.stderr
