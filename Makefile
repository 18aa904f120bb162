# make demo        a small shop at work, end to end; SERVE=1 keeps it up afterwards
# make test        the tests that need no minutes
# make suite       all tests, with warnings as errors
# make check       everything that CI asks; MODES= leaves out the pairs of modes
# make static      format, lint, types, migrations and import layers
# make test-modes  the contract's tests in pairs of a journal and a transaction mode
# make torture     all processes killed, frozen and shut out for MINUTES, then the account; SEED repeats a run,
#                  JOURNAL and MODE choose the journal and the transaction mode
# make bench       what it costs, against plain sqlite3; CASES="enqueue wake" RUNS=5 PEERS=1 SCALE=0.1 JSON=file
# make venv        the virtual environment alone; VENV=.venv PYTHON=python3
# make help        this list

PYTHON ?= python3
VENV ?= .venv
SERVE ?=
CASES ?=
RUNS ?= 5
PEERS ?=
JSON ?=
SCALE ?= 1
# Pairs of a journal and a transaction mode (an empty one is Django's default). The suite itself runs on wal:IMMEDIATE.
MODES ?= wal: wal:EXCLUSIVE delete:DEFERRED
MINUTES ?= 5
SEED ?=
JOURNAL ?= wal
MODE ?= IMMEDIATE
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet
PYTEST = $(BIN)/python -m pytest -n 2
# Folders whose tests start few processes.
QUICK = tests/unit tests/contract tests/services tests/model tests/admin tests/project tests/repo
# What an installation depends on: a change to it installs again.
PACKAGE = pyproject.toml django_alkstore/__init__.py

.PHONY: help demo test torture bench check static suite test-modes venv
.DELETE_ON_ERROR:

# The first target: `make` alone does the same. It prints the comment at the top of this file.
help:
	@sed -n 's/^# //p; s/^#//p; /^$$/q' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.package
	@$(BIN)/python -m testproject.demo $(if $(filter-out 0 no,$(SERVE)),--serve)

test: $(VENV)/.test
	@$(PYTEST) -q $(QUICK)

torture: $(VENV)/.test
	@ALKSTORE_TEST_JOURNAL=$(JOURNAL) ALKSTORE_TEST_TRANSACTION_MODE=$(MODE) \
		$(BIN)/python -m tests.torture --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

check: static suite $(if $(MODES),test-modes)

static: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python manage.py makemigrations --check --dry-run
	$(BIN)/lint-imports

suite: $(VENV)/.check
	$(PYTEST) -W error

# The tests that are nearest to the database, once for each pair of modes.
test-modes: $(VENV)/.check
	@set -e; for pair in $(MODES); do \
		journal=$${pair%%:*} mode=$${pair#*:}; \
		echo "== journal $$journal, transaction mode $${mode:-unset}"; \
		ALKSTORE_TEST_JOURNAL=$$journal ALKSTORE_TEST_TRANSACTION_MODE=$$mode \
			$(PYTEST) -q -W error tests/contract tests/services tests/concurrency; \
	done

bench: $(VENV)/.package
	@$(BIN)/python -m bench $(CASES) --runs $(RUNS) --scale $(SCALE) $(if $(JSON),--json $(JSON)) $(if $(filter-out 0 no,$(PEERS)),--peers)

venv: $(VENV)/.venv

$(VENV)/.venv:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON). Name a Python 3.11 or newer: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$$($(PYTHON) --version) is too old. Name a Python 3.11 or newer: make PYTHON=..."; exit 1; }
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@touch $@

$(VENV)/.package: $(VENV)/.venv $(PACKAGE)
	@echo "Installing the package into $(VENV)"
	@$(PIP) --editable ".[tasks]"
	@touch $@

$(VENV)/.test $(VENV)/.check: $(VENV)/.%: $(VENV)/.venv $(PACKAGE)
	@echo "Installing the package and what '$*' needs into $(VENV)"
	@$(PIP) --editable . --group $*
	@touch $@
