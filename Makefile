# What a contributor runs. It takes make and Python 3.11 or newer with pip; everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
# Handed to pip, for example to say where it finds its packages.
INSTALL_ARGS ?=

python := $(VENV)/bin/python
installed := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench format clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(installed) ## train with a parameter server over local processes and watch the loss fall
	$(python) examples/parameter_server.py

test: $(installed) ## run the tests: warnings are errors, asyncio runs in debug mode
	$(python) -m pytest --durations=10

check: $(installed) ## lint, check the format, check the types
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

bench: $(installed) ## measure arpc against torch.distributed.rpc and the bare floor
	$(python) -m scripts.bench

format: $(installed) ## format the code and apply the safe fixes
	$(python) -m ruff check --fix-only .
	$(python) -m ruff format .

clean: ## remove caches and build products; .venv stays
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# One pip run for all, so that the pin on torch holds while the rest is resolved.
$(installed): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "arpc needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	$(python) -m pip install $(INSTALL_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@
