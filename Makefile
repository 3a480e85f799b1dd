# dpkernels from a fresh clone: `make demo` trains privately on real data, `make test` runs the tests, `make test-all` the slow ones too.
# Everything is made inside the clone: .venv/ (tools/environment.py says which torch it gets), build/ and runs/.
#   make PYTHON=python3.12   the Python of .venv, where `python3` is not the right one

PYTHON ?= python3
# Looked up before .venv/bin is on PATH.
BASE_PYTHON := $(shell command -v $(PYTHON))
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
CPP := build/cpp
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# ninja, cmake and the compiled tools of .venv first; behind them, those of an environment that .venv shares.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test test-all cpp-test lint build bench cuda clean
.DELETE_ON_ERROR:

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile

demo: build ## Train a classifier privately on real handwritten digits
	@rm -rf runs/demo
	$(BIN)/dpkernels train --dataset digits --epsilon 3 --out runs/demo

# A worker for each CPU; a file's tests stay together, as their fixtures want. Memory, not CPUs, sets the most.
PYTEST = DPKERNELS_SIMT=$(CPP) $(BIN)/python -m pytest -n auto --maxprocesses 8

test: cpp-test ## Run the C++ tests and the Python tests, without the slow ones
	$(PYTEST) --dist loadfile

test-all: cpp-test ## Run every test, the slow ones included
	$(PYTEST) --dist loadfile -m ""

cpp-test: $(STAMPS)/test
	cmake -S . -B $(CPP) -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python $(CMAKE_OPTIONS)
	cmake --build $(CPP)
	ctest --test-dir $(CPP) --output-on-failure

lint: $(STAMPS)/lint ## Check style, types and formatting
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	clang-format --dry-run -Werror $(shell find csrc tests/cpp tests/simt -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

build: $(STAMPS)/build ## Make .venv and build dpkernels in it; the other targets do it first

bench: $(STAMPS)/build ## Time every operator against its reference
	$(BIN)/python -m benchmarks.kernels --json build/kernels.json

cuda: ## Build dpkernels for CUDA in .venv-cuda, with a GPU or without, and check it
	@$(MAKE) --no-print-directory VENV=.venv-cuda ENVIRONMENT=--cuda .venv-cuda/stamps/cuda
	.venv-cuda/bin/dpkernels doctor

clean: ## Remove everything that make made, except runs/
	rm -rf .venv .venv-cuda build dist *.egg-info dpkernels/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than all that its step depends on.

$(STAMPS)/environment: tools/environment.py
	@test -n "$(BASE_PYTHON)" || { echo "dpkernels: no Python: '$(PYTHON)' is not on PATH" >&2; exit 1; }
	@$(BASE_PYTHON) tools/environment.py $(VENV) $(ENVIRONMENT)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build: $(STAMPS)/environment pyproject.toml setup.py $(shell find csrc -type f)
	@echo "dpkernels: installing what dpkernels needs and compiling its kernels (minutes the first time)"
	@$(PIP) --no-build-isolation --editable . || { echo "dpkernels: the build failed; the reason is above" >&2; exit 1; }
	@touch $@

$(STAMPS)/cuda: $(STAMPS)/environment pyproject.toml setup.py $(shell find csrc dpkernels -name '*.so' -prune -o -type f -print)
	@echo "dpkernels: installing what dpkernels needs and compiling its kernels for the CPU and for CUDA (minutes)"
	@DPKERNELS_CUDA=1 $(PIP) --no-build-isolation . || { echo "dpkernels: the build failed; the reason is above" >&2; exit 1; }
	@touch $@

# The extras of the dpkernels that is installed already, and of torchvision the release that fits the torch that is there.
$(STAMPS)/test $(STAMPS)/lint: $(STAMPS)/build
	@$(BIN)/python -c "import torch; print('torch==' + torch.__version__)" > $(STAMPS)/torch.txt
	@$(PIP) --constraint $(STAMPS)/torch.txt 'dpkernels[$(@F)]'
	@touch $@
