# pyalloc: `make help` lists the targets.  Everything is installed into $(VENV), nothing outside it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV ?= .venv
# The Python versions that setup.py accepts: 3.10 or newer.
FITS := import sys; sys.exit(sys.version_info < (3, 10))
# Prefers the active environment's Python: the user chose it, and it may have PyTorch.  Uses its own path, because PATH
# may find another one first, or only another one if the environment was removed.
PYTHON ?= $(shell for each in "$${VIRTUAL_ENV:-/none}/bin/python" "$${CONDA_PREFIX:-/none}/bin/python" python3.11 python3; do \
    "$$each" -c '$(FITS)' && command -v "$$each" && break; done 2>/dev/null)
CC ?= cc
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PYTEST := $(PY) -m pytest
# The build is stale if one of these is newer.
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.made:
	@said=$$("$(PYTHON)" -c '$(FITS)' 2>&1) || { echo "pyalloc needs Python 3.10 or newer; try make PYTHON=/path/to/python3.11"; \
		[ -z "$(PYTHON)" ] || [ -z "$$said" ] || echo "$${said#*: line 1: }"; exit 1; }
	@.ci/make-venv "$(PYTHON)" $(VENV)
	@touch $@

$(VENV)/.tools: $(VENV)/.made pyproject.toml
	@echo "== Python tools for building and testing, into $(VENV)"
	@needed=$$(.ci/required $(PY) project optional-dependencies test) && $(PIP) install -q $$needed
	@touch $@

.PHONY: torch
torch: $(VENV)/.made ## install the CUDA build of PyTorch, unless there is one
	@.ci/ensure-torch $(VENV)

.PHONY: programs
programs: torch # libraries whose programs the tests run on pyalloc
	@.ci/ensure-torch $(VENV) --programs

$(VENV)/.built: $(VENV)/.tools $(SOURCES)
	@echo "== building pyalloc"
	@PYTHONWARNINGS='ignore:Editable installation' $(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

.PHONY: build
build: $(VENV)/.built ## the extension and the libraries, in place

.PHONY: demo
demo: build torch ## train the example under native, expandable, pyalloc; one table
	@.ci/ensure-torch $(VENV) --check "the demo needs PyTorch; try make test-core, which does not"
	@$(PY) examples/demo.py

.PHONY: test
test: build ## everything: C tests (plain, ASan+UBSan, TSan), pytest, style
	@.ci/test $(VENV)

.PHONY: test-core
test-core: build ## the C core and the Python tests without torch; about a minute
	@$(MAKE) -s -C tests/c run VARIANT=debug CC=$(CC)
	@$(PYTEST) -q -m 'not torch and not gpu and not slow' tests/unit tests/test_layering.py

FUZZ_SECONDS ?= 600
.PHONY: fuzz
fuzz: build ## all fuzz targets, FUZZ_SECONDS (600) by gcc, libFuzzer and AFL++
	@.ci/fuzz $(VENV) $(FUZZ_SECONDS)

.PHONY: fuzz-corpus
fuzz-corpus: ## copy useful new inputs of `make fuzz` to tests/fuzz/corpus
	@for t in core options trace; do kept=build/fuzz/kept/fuzz_$$t; \
		$(MAKE) -s -C tests/fuzz minimise ENGINE=fast ONLY=fuzz_$$t FROM="$$([ ! -d $$kept ] || echo ../../$$kept)" TINY=1 || exit 1; done

SOAK_MINUTES ?= 30
.PHONY: soak
soak: build ## threads, streams, devices and faults, for SOAK_MINUTES (30)
	@$(MAKE) -s -C tests/c soak SOAK_SECONDS=$$(($(SOAK_MINUTES) * 60))

.PHONY: valgrind
valgrind: ## the C tests under memcheck
	@$(MAKE) -s -C tests/c valgrind

.PHONY: test-arm64
test-arm64: ## the C tests for arm64, by a cross compiler and qemu
	@for tool in aarch64-linux-gnu-gcc aarch64-linux-gnu-g++ qemu-aarch64-static; do command -v $$tool >/dev/null || { \
		echo "no $$tool (Debian: apt-get install gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user-static)"; exit 1; }; done
	@$(MAKE) -s -C tests/c run CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ OUT=../../build/c/arm64 HOSTCUDA= \
		RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"

ARM64 ?= build/arm64
.PHONY: demo-arm64
demo-arm64: ## the demo for arm64, in a Debian under qemu (root; 12 GB)
	@.ci/on-arm64 $(ARM64) make demo

.PHONY: coverage
coverage: build programs ## lines of csrc/ that the whole test suite runs
	@.ci/coverage $(VENV)

.PHONY: test-versions
test-versions: build ## parity and dry runs on several torches (KEEP=1: all stay, 25 GB)
	@.ci/test-versions "$(PYTHON)"

.PHONY: style
style: build ## clang-format, clang-tidy, ruff, mypy
	@$(PYTEST) -q tests/test_style.py

.PHONY: cuda
cuda: ## compile the CUDA kernels (without nvcc: compiled at first use)
	@$(MAKE) -s -C cuda OUT=../pyalloc/lib

.PHONY: wheel
wheel: $(VENV)/.tools ## one abi3 wheel in dist/
	@$(PIP) wheel -q --no-build-isolation --no-deps -w dist .
	@ls -l dist/*.whl

.PHONY: format
format: $(VENV)/.tools ## rewrite C and Python sources in the house style
	@find csrc tests benchmarks -name '*.[ch]' -o -name '*.[ch]pp' | xargs $$(.ci/find-tool $(PY) clang-format) --style=file:csrc/.clang-format -i
	@ruff=$$(.ci/find-tool $(PY) ruff) && "$$ruff" format . && "$$ruff" check --fix .

.PHONY: clean
clean: ## build products (keeps $(VENV))
	@rm -rf build dist *.egg-info pyalloc/lib pyalloc/*.so $(VENV)/.built
