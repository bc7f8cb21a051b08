# make setup | up | test | clean        PYTHON=python3.12 make setup picks the interpreter

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.ready
RUN := $(VENV)/bin

.PHONY: setup up test lint types clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Baton needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[node,test]'
	@touch $@

# exec: Ctrl-C and SIGTERM reach Baton itself. ARGS="--decode 2" passes flags on.
up: setup
	@exec $(RUN)/baton up $(ARGS)

lint: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: setup
	$(RUN)/basedpyright

# Tests that start processes of their own run alone; 5: none of ARGS' tests was of that kind.
test: lint types
	OMP_NUM_THREADS=1 $(RUN)/pytest -n logical --maxprocesses 8 -m "not integration" $(ARGS) || [ $$? -eq 5 ]
	$(RUN)/pytest -m integration $(ARGS) || [ $$? -eq 5 ]

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
