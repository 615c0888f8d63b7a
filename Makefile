# The two commands: make demo, make test. Everything is installed, pinned and hashed, into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.peers-installed

.PHONY: demo serve test test-slow peers check lock clean

$(STAMP): requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	# The lock is complete: nothing is left to resolve, and older pips trip over packages with extras when they try.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements.lock
	touch $(STAMP)

demo: $(STAMP) ## Build a dataset from the texts in deployments/demo and read it back.
	$(BIN)/python -m flows build deployments/demo/demo.yaml --no-server
	PYTHONPATH=. $(BIN)/python deployments/demo/read_back.py demo-output
	@echo
	@echo "To watch builds in the Prefect UI, start it, and let a build report to it:"
	@echo "  make serve                                       # then open http://127.0.0.1:4200"
	@echo "  PREFECT_API_URL=http://127.0.0.1:4200/api $(BIN)/python -m flows build deployments/demo/demo.yaml --set split_seed=1"

serve: $(STAMP) ## A Prefect server (UI on http://127.0.0.1:4200), workers and deployments, until Ctrl-C. SERVE="dataset.yaml --cron '0 3 * * *'"
	$(BIN)/python deployments/serve.py $(SERVE)

# A process for each core; which tests stay together is in tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8

test: $(STAMP) ## Run the tests, but for the slow ones: a few minutes on two cores.
	$(PYTEST) -m "not slow"

test-slow: $(STAMP) ## Run the slow tests: kills, services, stores under faults, whole corpora, and properties with all their examples.
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile all

peers: $(PEERS) ## Install torch, jax and other projects' own readers, too: tests that need them are skipped without.

$(PEERS): $(STAMP) tests/peers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement tests/peers.txt
	# Not hashed, and with its dependencies: a machine may have a wheel for its CPU, while the registry's needs CUDA packages.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts torch==2.13.0
	touch $(PEERS)

check: $(STAMP) ## Format, lint, types, directions of imports.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

COMPILE := $(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

lock: ## Pin every dependency with its hashes; the lock names no package index.
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet uv
	$(COMPILE) --no-strip-extras --group service --group dev pyproject.toml --output-file requirements.lock
	$(COMPILE) --no-deps --constraint requirements.lock tests/peers.in --output-file tests/peers.txt
	rm -r $(VENV)-lock

clean:
	rm -rf $(VENV) demo-output
