# `make` or `make help` lists the targets. PYTHON=python3.12 make setup picks the interpreter.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.ready
RUN := $(VENV)/bin
WORKERS = $$(($$(getconf _NPROCESSORS_ONLN) + 1))

# Without bytecode on disk each process of the tests would compile Baton and the tests' files again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup up format lint types quick tests test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the pinned dependencies

# pip would compile all packages on one core. Files that are templates or for another Python cannot be compiled.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Baton needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[node,test]'
	@$(RUN)/python -m compileall -qq -j 0 $(VENV)/lib || true
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

# One worker more than cores, because tests also wait. Each begins with a third or less of the files, so that what the
# tests of a file share is made once, and takes tests from the others when it has none left (worksteal). Tests that
# start processes of their own mostly wait. They run beside the others, two files at a time. A test that fails gets
# another chance (tests/again.py).
# The first command compiles all tests' files. Otherwise each worker would compile them in a fresh clone. The second one
# runs a few tests (tests/other_processor.txt) with the sums of an older processor, and compiles numba's kernels.
tests: setup ## the tests alone
	@$(RUN)/pytest -q --collect-only > /dev/null || true
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(RUN)/pytest -q $$(sed 's/#.*//' tests/other_processor.txt)
	OMP_NUM_THREADS=1 $(RUN)/python tests/again.py -n $(WORKERS) --maxprocesses 8 --dist worksteal -m "not integration" $(ARGS) \
		--beside -n 2 --dist loadfile -m integration $(ARGS)

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
