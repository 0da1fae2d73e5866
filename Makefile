# make demo   frames of a tiny LTX-Video, before and after injection
# make test   lint and tests
# make test-torch TORCH=2.11.0  tests of ops and injection with another PyTorch, in a .venv of its own;
#             not part of make test
# make mutants  small changes of the code that no test notices; some minutes, not part of make test
# make docs   the tables and the picture of README.md and docs/, and the site in build/site
# make pins   constraints.txt with the newest versions; TORCH=2.14.1 also changes PyTorch
# make dist   wheel and sdist in dist/, checked as PyPI will
# all set up .venv on their first run; PYTHON=python3.12 picks another interpreter.
# VENV=path takes an environment of yours with kernelwright[cuda,models,video,dev] as it is;
# CHROMIUM=no downloads no browser, and the tests of the report page that need one skip

PYTHON ?= python3
ifdef VENV
BIN := $(VENV)/bin
READY :=
else
BIN := .venv/bin
READY := .venv/ready
endif
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
CPU_WHEELS := https://download.pytorch.org/whl/cpu

BUILD := $(if $(shell command -v nvidia-smi),CUDA,CPU)

# some environments turn it off: then every worker and every command in a test compiles all modules
unexport PYTHONDONTWRITEBYTECODE

# of make test-torch
OTHER := .venv-torch-$(TORCH)
TESTS ?= tests/ops tests/inject tests/calibration

.PHONY: demo test lint ruff mypy pytest test-torch mutants format docs pins dist clean

demo: $(READY)
	$(BIN)/kernelwright demo --save build/demo.png

# mypy runs while the workers of pytest start and collect
test: ruff
	$(MAKE) -j2 mypy pytest

lint: ruff mypy

ruff: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(READY)
	$(BIN)/mypy

pytest: $(READY)
ifeq ($(CHROMIUM)$(VENV),)
	tests/get_chromium.sh .venv
endif
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-torch: $(OTHER)/ready
	$(OTHER)/bin/python -c 'import torch; print("PyTorch", torch.__version__)'
	$(OTHER)/bin/python -m pytest -n 2 --dist worksteal $(TESTS)

mutants: $(READY)
	$(BIN)/python tests/mutants.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# tables and picture from the code and from results/, then the site, whose warnings are errors
docs: $(READY)
	$(BIN)/python docs/gen.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pins: $(READY)
	$(BIN)/pip install -q uv
	$(BIN)/python tools/refresh_pins.py $(TORCH)

dist: $(READY)
	$(BIN)/pip install -q build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# torch comes first and alone: a resolver that may still choose takes the newest cuda build,
# gigabytes of it. without an nvidia driver the cpu build does; the cuda build pins its own
# triton and cuda wheels, so those constraints are left out beside it
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kernelwright needs Python 3.10 or newer")'
	@echo "Setting up .venv: downloads PyTorch's $(BUILD) build and the packages of constraints.txt, to run" \
	  "models; make test also a headless browser, to open the report page. To do without: VENV=path" \
	  "takes an environment of yours, CHROMIUM=no skips the browser's tests."
	$(PYTHON) -m venv .venv
ifeq ($(BUILD),CPU)
	cp constraints.txt .venv/constraints.txt
	$(BIN)/pip install -q -c .venv/constraints.txt "torch==$(TORCH)+cpu" \
	|| $(BIN)/pip install -q -c .venv/constraints.txt --extra-index-url $(CPU_WHEELS) torch
else
	grep -Ev '^(triton|cuda-|nvidia-)' constraints.txt > .venv/constraints.txt
	$(BIN)/pip install -q -c .venv/constraints.txt torch
endif
	$(BIN)/pip install -q -c .venv/constraints.txt -e '.[cuda,models,video,dev]'
	touch $@

# the cpu build if its index answers; else that of PyPI, with its own triton and cuda wheels. The
# interpreter of older tritons makes numbers of arrays, which NumPy 2.4 refuses
$(OTHER)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep -Ev '^(torch==|triton|cuda-|nvidia-|setuptools|numpy==)' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install -q -c $(OTHER)/constraints.txt "torch==$(TORCH)+cpu" \
	|| $(OTHER)/bin/pip install -q -c $(OTHER)/constraints.txt --extra-index-url $(CPU_WHEELS) "torch==$(TORCH)+cpu" \
	|| $(OTHER)/bin/pip install -q -c $(OTHER)/constraints.txt "torch==$(TORCH)"
	printf 'torch==$(TORCH)\nnumpy<2.4\n' >> $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install -q -c $(OTHER)/constraints.txt -e '.[cuda,models,video,dev]'
	touch $@

clean:
	rm -rf .venv .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache
