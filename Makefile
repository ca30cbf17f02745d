# What a contributor runs. It takes make and Python 3.11 or newer with pip; everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
# Handed to pip, for example to say where it finds its packages.
INSTALL_ARGS ?=
# How many processes share the tests: what waits in one leaves the CPU to another.
TEST_PROCESSES ?= 2
# Handed to the bench, for example --quick.
BENCH_ARGS ?=
# Handed to the conformance run, for example --sample.
CONFORMANCE_ARGS ?=
# Handed to the comparison of clients, for example --repeat 3 -k torchrl.
CLIENTS_ARGS ?=
# Handed to the fuzzer, for example --runs 10000 pickles.
FUZZ_ARGS ?=
# Handed to the soak, for example --seconds 600 --seed 7.
SOAK_ARGS ?=
# Handed to nox by `make matrix`, for example --list, or -k oldest.
MATRIX_ARGS ?=
# What arpc is compared with. It goes into an environment of its own: none of it is needed to work on arpc.
PEERS_VENV ?= .venv-peers
PEERS := ray grpcio xoscar torchmonarch distributed rpyc
# Libraries that use torch.distributed.rpc, in an environment of their own as well.
CLIENTS_VENV ?= .venv-clients
CLIENTS := tensordict torchrl torch_geometric

python := $(VENV)/bin/python
installed := $(VENV)/.installed
peers_python := $(PEERS_VENV)/bin/python
peers_installed := $(PEERS_VENV)/.installed
clients_python := $(CLIENTS_VENV)/bin/python
clients_installed := $(CLIENTS_VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check matrix bench bench-peers figures conformance clients fuzz soak docs wheel format clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(installed) ## train with a parameter server, kill a trainer on the way and watch it come back; KEEP=1 stays up
	$(VENV)/bin/arpc launch --dashboard --elastic --max-restarts 1 --role driver=1,server=1,trainer=3 \
	  examples/parameter_server.py --kill --pause 8 --plot build/parameter_server.png $(if $(KEEP),--keep)

test: $(installed) ## run the tests: warnings are errors, asyncio runs in debug mode
	$(python) -m pytest -n $(TEST_PROCESSES) --dist loadfile --durations=10

check: $(installed) ## lint, check the format, check the types
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

matrix: $(installed) ## run the tests on every Python that is found, with the oldest, the pinned and the newest torch
	INSTALL_ARGS="$(INSTALL_ARGS)" TEST_PROCESSES=$(TEST_PROCESSES) $(python) -m nox $(MATRIX_ARGS)

bench: $(installed) ## measure arpc against torch.distributed.rpc and the bare floor
	$(python) -m scripts.bench --targets --plot build $(BENCH_ARGS)
	$(python) -m scripts.bytecodes

bench-peers: $(peers_installed) ## measure arpc against Ray, grpc.aio, xoscar, Monarch, Dask and RPyC
	$(peers_python) -m scripts.bench --rows peers/ --json build/bench-peers.json --plot build $(BENCH_ARGS)

figures: $(peers_installed) ## measure what the README shows, and write its picture and its table
	$(peers_python) -m scripts.bench --rows 'shape/*/split*,peers/' --json build/figures.json $(BENCH_ARGS)
	$(peers_python) -m scripts.readme_figures build/figures.json

conformance: $(installed) ## run torch's own RPC tests on arpc.compat, and show what passes
	$(python) -m scripts.conformance $(CONFORMANCE_ARGS)

clients: $(clients_installed) ## run TorchRL, PyTorch Geometric, tensordict and others on torch and on arpc, and compare
	$(clients_python) -m scripts.clients $(CLIENTS_ARGS)

fuzz: $(installed) ## feed the wire, the handshake and the restricted unpickler a million bad inputs each
	$(python) -m pip install -q $(INSTALL_ARGS) -c constraints.txt -e '.[fuzz]'
	$(python) scripts/fuzz.py $(FUZZ_ARGS)

soak: $(installed) ## kill, stop, cut off and restart workers under load, and account for every call
	$(python) -m scripts.soak --json build/soak.json $(SOAK_ARGS)

wheel: $(installed) ## build the distributions and try the wheel in an environment of its own
	$(python) -m scripts.check_wheel

docs: $(installed) ## build the pages into build/site
	$(python) -m pip install --quiet $(INSTALL_ARGS) -c constraints.txt -e '.[docs]'
	$(python) -m mkdocs build --strict --config-file scripts/mkdocs.yml
	$(python) -m scripts.check_links build/site

format: $(installed) ## format the code and apply the safe fixes
	$(python) -m ruff check --fix-only .
	$(python) -m ruff format .

clean: ## remove caches and build products; .venv, .venv-peers and .venv-clients stay
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

# One pip run for all, so that the pin on torch holds while the rest is resolved.
$(installed): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "arpc needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	$(python) -m pip install $(INSTALL_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

# One pip run each: what cannot be had here is left out, and the bench says so.
$(peers_installed): pyproject.toml constraints.txt
	test -x $(peers_python) || $(PYTHON) -m venv $(PEERS_VENV)
	$(peers_python) -m pip install $(INSTALL_ARGS) -c constraints.txt -e '.[bench,demo]'
	@for peer in $(PEERS); do \
	  $(peers_python) -m pip install $(INSTALL_ARGS) -c constraints.txt $$peer || echo "$$peer: not installed"; \
	done
	@touch $@

# torch first: the clients ask for any torch, and must find the pinned one.
$(clients_installed): pyproject.toml constraints.txt
	test -x $(clients_python) || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(clients_python) -m pip install $(INSTALL_ARGS) -c constraints.txt -e .
	$(clients_python) -m pip install $(INSTALL_ARGS) -c constraints.txt $(CLIENTS)
	@touch $@
