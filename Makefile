# Every target does its own set-up: in a fresh clone, "make demo" is the first command.
# The second run of a target finds the stamp and starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
READY := $(VENV)/.ready
READY_BENCH := $(VENV)/.ready-bench
READY_ALL := $(VENV)/.ready-all
READY_DOCS := $(VENV)/.ready-docs

DEMO_ARGS ?= --verify
# Many tests wait for ranks more than they compute, so four files at once suit two cores.
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder
# The slow ones compute more, and some count seconds: four at once would be late now and then.
ALL_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder
# Each of these tests starts jobs of two and three ranks that import a trainer.
INTEGRATIONS_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
BENCH_ARGS ?=
GPU_ARGS ?=
BENCHMARKS ?= collectives ddp fsdp pipeline checkpoint many_ranks pytest_ranks

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo docs test test-all test-long check device bench gpu clean

help:
	@echo "make demo    train a GPT on real text over two local processes"
	@echo "make test    checks, then all tests that are not slow"
	@echo "make test-all  checks, then all tests: what .ci/run does, with all extras"
	@echo "make test-long  what takes minutes to hours: every kill point, fuzzing, repetitions"
	@echo "make check   format, lint, types and architecture"
	@echo "make docs    the documentation site, in build/site"
	@echo "make bench   echelon and its peers side by side, with ratios"
	@echo "make gpu     what one GPU can prove, in nine minutes, without a network"
	@echo "make clean   remove $(VENV), caches and build outputs"

demo: $(READY)
	$(BIN)/echelon run --ranks 2 --world processes examples/train_gpt.py $(DEMO_ARGS)
	@report=$$(ls -t runs/*/report.html 2>/dev/null | head -n 1); \
	if [ -n "$$report" ]; then echo "The report is in $(CURDIR)/$$report"; \
	else echo "The demo left no report under $(CURDIR)/runs" >&2; exit 1; fi

# Ranks are many short processes. To compile the same files in each takes a tenth of the time.
unexport PYTHONDONTWRITEBYTECODE

# Compiled once, or several tests would do so at the same time and run out of theirs.
device: $(READY)
	@$(BIN)/python -m echelon.testing.device

# The checks have run tests/architecture already.
test: export OMP_NUM_THREADS = 1
test: check device
	$(BIN)/python -m pytest --ignore=tests/architecture --ignore=tests/integrations \
	  -m "not slow" $(PYTEST_ARGS)

# The tests of integrations need the trainers, trackers and data sets that they integrate.
test-all: export OMP_NUM_THREADS = 1
test-all: $(READY_ALL) check device
	$(BIN)/python -m pytest --ignore=tests/architecture --ignore=tests/integrations $(ALL_ARGS); \
	  others=$$?; $(BIN)/python -m pytest tests/integrations $(INTEGRATIONS_ARGS) && exit $$others

# Everything that takes minutes to hours; CONTRIBUTING.md says when.
test-long: export OMP_NUM_THREADS = 1
test-long: $(READY)
	$(BIN)/python -m pytest -x tests/long

check: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

# Every warning is an error: a broken link, a page that is in no menu, a name without a docstring.
docs: $(READY_DOCS)
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "The site is in $(CURDIR)/build/site/index.html"

# For a bare machine: no set-up, no network. See docs/cuda.md.
gpu:
	$(PYTHON) benchmarks/gpu.py $(GPU_ARGS)

bench: export OMP_NUM_THREADS = 1
bench: $(READY_BENCH)
	@for name in $(BENCHMARKS); do \
	  echo "== $$name"; \
	  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/$$name.py $(BENCH_ARGS) || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Python packages from setuptools on are pinned: without build isolation, the build tool is too.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "echelon needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV). torch is large: the first time takes some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment (Debian: apt install python3-venv)." >&2; \
	  exit 1; }
	@$(PIP) install -c constraints.txt setuptools
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

$(READY_ALL): $(READY)
	@$(PIP) install -c constraints.txt --no-build-isolation \
	  -e ".[dev,lightning,transformers,ray,trackers,data,docs,hosts]"
	@touch $@

$(READY_DOCS): $(READY)
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev,docs]"
	@touch $@

# MPICH is a peer in the tables, not a need: where it has no wheel, its column is left out.
$(READY_BENCH): $(READY)
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[bench]" \
	  || echo "mpi4py or mpich cannot be installed here: the tables will have no MPICH column." >&2
	@touch $@
