# The two commands: make demo, make test. Everything is installed, pinned and hashed, into .venv. make help lists all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools-installed
STAMP := $(VENV)/.installed
TESTS := $(VENV)/.tests-installed
PEERS := $(VENV)/.peers-installed
SECRET := $(or $(PREFECT_HOME),$(HOME)/.prefect)/flat-tokens-secret

SITE := $(VENV)-docs

.PHONY: help demo serve test test-slow test-nightly test-lowest test-newest faults fuzz benchmarks peers check docs lock wheels clean

help: ## List the commands.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F '\t' '{ printf "make %-12s %s\n", $$1, $$2 }'

# What a command imports is compiled once, even if the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-deps
# pip installs if there is no uv for this machine, or if uv does not reach the package index that pip.conf names.
install = { test -x $(BIN)/uv && $(BIN)/uv pip install --python $(BIN)/python --no-deps $(1); } || $(PIP) $(1)

$(TOOLS): tests/tools.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	@echo "An environment in $(VENV), and uv, which installs the rest"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --quiet --require-hashes --requirement tests/tools.txt || \
		{ echo "There is no uv for this machine: pip installs, in some minutes" && $(PIP) --quiet "setuptools>=77"; }
	@touch $(TOOLS)

# The locks are complete: nothing is left to resolve.
$(STAMP): requirements.lock | $(TOOLS)
	@$(call install,--require-hashes --requirement requirements.lock)
	@$(call install,--no-build-isolation --editable .)
	@sh docker/trim.sh $(VENV)/lib/python3.*/site-packages
	@printf '#!/bin/sh\nexec "$$(dirname "$$(readlink -f "$$0")")/python" -P -m flows "$$@"\n' > $(BIN)/flat-tokens-service
	@chmod +x $(BIN)/flat-tokens-service
	@$(BIN)/python -m compileall -q flat_tokens tasks flows deployments
	@touch $(STAMP)

$(TESTS): $(STAMP) tests/dev.txt
	@$(call install,--require-hashes --requirement tests/dev.txt)
	@touch $(TESTS)

demo: $(STAMP) ## Build a dataset from the texts in deployments/demo and read it back.
	$(BIN)/python -m flows build deployments/demo/demo.yaml --no-server
	PYTHONPATH=. $(BIN)/python deployments/demo/read_back.py demo-output
	@echo
	@echo "To watch builds in the Prefect UI, start it, and let a build report to it:"
	@echo "  make serve                           # then open http://127.0.0.1:4200; it asks for the secret in $(SECRET)"
	@echo '  export PREFECT_API_URL=http://127.0.0.1:4200/api PREFECT_API_AUTH_STRING="$$(cat $(SECRET))"'
	@echo "  $(BIN)/python -m flows build deployments/demo/demo.yaml --set split_seed=1"

serve: $(STAMP) ## A Prefect server (UI on http://127.0.0.1:4200, with a secret), workers and deployments, until Ctrl-C. SERVE="dataset.yaml --cron '0 3 * * *'"
	$(BIN)/python deployments/serve.py $(SERVE)

# A process for each core; which tests stay together is in tests/conftest.py. How long each test took is in $(REPORTS).
REPORTS := $(VENV)/reports
PYTEST = $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --durations 20 --junit-xml $(REPORTS)/$(or $(REPORT),$@).xml

SELECT := not slow

test: $(TESTS) ## Run the tests, but for the slow ones: a few minutes on two cores. SELECT="shared" for those that need ../shared.
	$(PYTEST) -m "$(SELECT)"

# Many of these wait for a server or a worker: two processes more than cores.
test-slow: $(TESTS) ## Run the slow tests: kills, services, stores under faults, whole corpora, samples of campaigns.
	$(PYTEST) --numprocesses $$(($$(nproc) + 2)) -m "slow and not nightly $(MORE)" --hypothesis-profile all

test-nightly: $(TESTS) ## Run what the others sample: properties with all their examples, every tokenizer of the family, all sabotages, every table.
	$(PYTEST) -m "nightly or (hypothesis and not slow)" --hypothesis-profile all

LOWEST := $(VENV)-lowest

test-lowest: $(STAMP) ## Run fast tests of the library with the lowest versions that pyproject.toml declares: a minute.
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
		--requirements pyproject.toml --extra formats --extra tokenizers --extra stores --extra pages
	# What the tests themselves need, and the small builds among them.
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python \
		pytest pytest-timeout pytest-xdist hypothesis pydantic awkward
	$(LOWEST)/bin/python -m pytest --numprocesses logical --maxprocesses 8 -m "not slow" $(VERSIONS_TESTS)

NEWEST := $(VENV)-newest

test-newest: $(STAMP) ## Run fast tests of the library with the newest versions of everything, on Python 3.13 or newer: a minute. PYTHON_NEWEST=...
	python=$${PYTHON_NEWEST:-$$(.ci/newest-python)}; test -n "$$python" || exit 0; \
	$(BIN)/uv venv --quiet --clear --no-python-downloads --python "$$python" $(NEWEST) && \
	$(BIN)/uv pip install --quiet --upgrade --python $(NEWEST)/bin/python \
		--requirements pyproject.toml --extra formats --extra tokenizers --extra stores --extra signatures --extra pages \
		pytest pytest-timeout pytest-xdist hypothesis pydantic awkward && \
	$(NEWEST)/bin/python -m pytest --numprocesses logical --maxprocesses 8 -m "not slow" $(VERSIONS_TESTS)

# What stands on numpy, zarr, fsspec and pyarrow, a test file for each way.
VERSIONS_TESTS := $(addprefix tests/flat_tokens/,arrays stores record rows/test_views.py rows/test_loader.py rows/test_packing.py \
	rows/test_selection.py formats/test_conformance.py formats/test_parquet.py text/test_source_formats.py \
	test_reader.py test_columns.py test_vocabulary.py test_forgotten.py test_keys.py)

faults: $(TESTS) ## Kill, fail and cut off every command at every operation: at most two hours. Counts go into docs/measured/faults.md.
	$(BIN)/python -m tests.faults --table docs/measured/faults.md

SECONDS := 600

fuzz: $(TESTS) ## Fuzz what reads bytes from elsewhere, 600 seconds a target. SECONDS=60 TARGETS="parquet yaml"
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(TARGETS)

BENCHMARKS := /var/tmp/flat-tokens-benchmarks

benchmarks: $(TESTS) ## Measure every table of docs/measured/benchmarks.md and write the page: an hour, on a machine with nothing else to do.
	$(BIN)/python -m tests.benchmarks --scratch $(BENCHMARKS)

peers: $(PEERS) ## Install torch, jax and other projects' own readers, too: tests that need them are not selected without.

$(PEERS): $(TESTS) tests/peers.txt
	$(call install,--require-hashes --requirement tests/peers.txt)
	# Not hashed, and with its dependencies: a machine may have a wheel for its CPU, while the registry's needs CUDA packages.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts torch==2.13.0
	# An emulator of Azure's blob storage. Its tests are skipped without.
	command -v npm > /dev/null && npm install --silent --no-audit --no-fund --no-save --prefix $(VENV)/azurite azurite@3.37.0 || \
		echo "no npm, or no azurite there: tests on Azure are skipped"
	touch $(PEERS)

check: $(TESTS) ## Format, lint, types, directions of imports, names, words, size, one way to open; types and links of the documentation.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.names
	$(BIN)/python -m tests.words
	$(BIN)/python -m tests.doors
	$(BIN)/python -m tests.size
	$(BIN)/python -m tests.docs.typed
	$(BIN)/python -m pytest --quiet tests/docs/test_links.py tests/docs/test_words.py

docs: $(SITE)/.installed ## Build the documentation with its API page into site/: open site/index.html, or serve it with python -m http.server.
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

$(SITE)/.installed: tests/docs.txt
	$(PYTHON) -m venv --clear $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement tests/docs.txt
	touch $@

COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

lock: $(TOOLS) ## Pin every dependency with its hashes; the lock names no package index.
	$(COMPILE) tests/tools.in --output-file tests/tools.txt
	$(COMPILE) tests/docs.in --output-file tests/docs.txt
	$(COMPILE) --no-strip-extras --group service pyproject.toml --output-file requirements.lock
	$(COMPILE) --no-strip-extras --constraint requirements.lock --group pyproject.toml:dev --output-file tests/dev.txt
	$(COMPILE) --no-deps --constraint requirements.lock tests/peers.in --output-file tests/peers.txt
	# torch is not hashed: see PEERS. The benchmarks' peers have environments of their own.
	echo "torch; sys_platform == 'never'" > $(VENV)/no-torch
	for peer in datatrove datasets megatron; do \
		$(COMPILE) --override $(VENV)/no-torch --constraint requirements.lock \
			tests/benchmarks/peer_programs/$$peer.in --output-file tests/benchmarks/peer_programs/$$peer.txt || exit 1; \
	done
	rm $(VENV)/no-torch

wheels: $(STAMP) ## Make dist/flat_tokens-*.whl, what trainers install, and dist/flat_tokens_service-*.whl, the service without a checkout.
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist . ./service
	rm -r build service/build service/*.egg-info # make check would look through them

clean: ## Remove what was installed, and the demo's dataset.
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(SITE) site demo-output
