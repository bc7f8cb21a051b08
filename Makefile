# `make` or `make help` lists the targets. PYTHON=python3.12 make setup picks the interpreter.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.ready
RUN := $(VENV)/bin

# Without bytecode on disk each process of the tests would compile Baton and the tests' files again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup up format lint types quick tests test dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the pinned dependencies

# Python compiles a module when it is first imported; most of the packages' modules never are.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Baton needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)" >&2; exit 1; }
	@echo "Making $(VENV) with the pinned dependencies, once: a few minutes and about 2.7 GB (more if torch brings CUDA)." >&2
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[hub,node,terminal,test]'
	@touch $@

# exec: Ctrl-C and SIGTERM reach Baton itself.
up: setup ## start a router, a prefill and a decode node; ARGS="--decode 2" passes flags on
	@exec $(RUN)/baton up $(ARGS)

format: setup ## mend what ruff can mend, and format
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

lint: setup ## check lint and format
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: setup ## check types
	$(RUN)/basedpyright

quick: lint types ## lint, types, and the tests that matter most (tests/quick.txt), in under a minute
	OMP_NUM_THREADS=1 $(RUN)/pytest -q -n 2 $$(sed 's/#.*//' tests/quick.txt) $(ARGS)

test: lint types tests ## everything that must pass before a change goes in; ARGS="-k name" picks tests

# tests/rooms.py runs each folder's tests in a process of its own, and repeats tests of time that failed (tests/again.py).
# The first command runs a few tests (tests/other_processor.txt) with the sums of an older processor, and compiles
# numba's kernels.
tests: setup ## the tests alone; ARGS="tests/router -k name" picks some
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(RUN)/pytest -q $$(sed 's/#.*//' tests/other_processor.txt)
	OMP_NUM_THREADS=1 $(RUN)/python tests/rooms.py $(ARGS)

dist: setup ## build the files of a release from the commit: sdist, wheel, bill of materials, checksums
	$(RUN)/python tests/benchmarks/upkeep/distributions.py

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
