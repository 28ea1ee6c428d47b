# `make demo` and `make test` set a fresh machine up and run. VENV= uses the running environment.
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
# An index to take torch from, e.g. the one with builds for machines without a GPU (much smaller).
TORCH_INDEX ?=
ARGS ?=
# Processes of the tests, and of the GPU tests.
JOBS ?= 2
GPU_JOBS ?= 14

BUILD_REQUIREMENTS = "setuptools>=77,<82" ninja cmake pybind11
REQUIREMENTS = expecttest hypothesis matplotlib numpy pytest pytest-timeout pytest-xdist safetensors tqdm \
	"transformers>=5.5,<5.25"

ifeq ($(strip $(VENV)),)
PYTHON := python3
STAMP := build/.installed
else
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
endif
# Byte code is made at first import: compiling all of torch takes longer than the demo's build.
PIP := $(PYTHON) -m pip install --quiet --progress-bar off --disable-pip-version-check --no-compile
# Small products are slower on several threads, much slower beside other work.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q --durations=10
PYTEST_CPU := $(PYTEST) -n $(JOBS) --dist worksteal -m "not slow and not gpu"
SOURCES := pyproject.toml setup.py CMakeLists.txt $(shell find csrc -type f)

.PHONY: demo test test-gpu test-all checkstyle install

demo: install
	$(PYTHON) -m flaop demo $(ARGS)

# The interpreter must be chosen before a kernel is imported: its tests are a process of their own, and
# so are those that compile kernels ahead of time (with processes of their own).
test: install
	@failed=0; \
	TRITON_INTERPRET=1 $(PYTEST_CPU) tests/kernels $(ARGS) || failed=1; \
	$(PYTEST) -m "not slow and not gpu" tests/kernels/test_aot.py $(ARGS) || failed=1; \
	$(PYTEST_CPU) --ignore=tests/kernels tests $(ARGS) || failed=1; \
	exit $$failed

# Most of its time is compilation, one kernel variant after another in each process.
test-gpu: install
	$(PYTEST) -n $(GPU_JOBS) --dist loadgroup -m "gpu and not slow" tests $(ARGS)

test-all: install
	@failed=0; \
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu" tests/kernels $(ARGS) || failed=1; \
	$(PYTEST) tests/kernels/test_aot.py tests/kernels/test_*configs_gpu.py $(ARGS) || failed=1; \
	$(PYTEST) --ignore=tests/kernels tests $(ARGS) || failed=1; \
	exit $$failed

checkstyle: install
	$(PIP) ruff clang-format
	$(PYTHON) -m ruff check .
	$(if $(strip $(VENV)),$(VENV)/bin/)clang-format --dry-run -Werror $$(find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

install: $(STAMP)

$(VENV)/bin/python:
	python3 -m venv $(VENV)

# pip leaves what is already there alone, so a machine without network passes if nothing is missing.
$(STAMP): $(if $(strip $(VENV)),$(VENV)/bin/python) $(SOURCES)
	$(PIP) $(BUILD_REQUIREMENTS)
	$(PYTHON) -c "import torch" 2>/dev/null || \
	  $(PIP) $(TORCH) $(TRITON) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(PYTHON) -c "import triton" 2>/dev/null || $(PIP) $(TRITON)
	$(PIP) $(REQUIREMENTS)
	$(PIP) --no-build-isolation --no-deps -e .
	@mkdir -p $(dir $(STAMP)) && touch $(STAMP)
