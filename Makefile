# One virtual environment in .venv; every target sets it up when pyproject.toml changed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv serve docs test test-fast test-all test-clients test-page soak mutate golden check

venv: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		(echo "pdserve needs Python 3.11 or newer: make PYTHON=python3.12 ..." && false)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

serve: venv
	$(BIN)/pdserve up cluster.yaml

# The documentation as a site, in build/site; a broken link or any other warning is an error.
docs: venv
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site

# Two processes; tests that start clusters are in one of them (tests/conftest.py). 19 minutes on
# two quiet cores.
test: venv
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

# What starts no process and computes little: 5 minutes.
test-fast: venv
	$(BIN)/python -m pytest -n 2 --dist loadgroup \
		-m "not slow and not lengthy and not processes and not ray"

# The slow ones too: clusters over several raylets, full matrices. Not the soak.
test-all: venv
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not soak"

# Unmodified clients of other projects against a running cluster, in an environment of their own:
# ten minutes. node and npm are for the AI SDK alone; without them its tests are skipped.
CLIENTS := .venv-clients/bin
test-clients: venv .venv-clients/installed
	$(CLIENTS)/python -m pytest -c tests/clients/pytest.ini tests/clients \
		--results=benchmarks/results/clients.md

.venv-clients/installed: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv .venv-clients
	$(CLIENTS)/python -m pip install --quiet --upgrade pip
	$(CLIENTS)/python -m pip install --quiet --requirement tests/clients/requirements.txt
	if command -v npm >/dev/null; then cd tests/clients && \
		npm install --no-package-lock --no-audit --no-fund --loglevel=error; fi
	touch $@

# The router's page in a real browser: needs Debian's chromium, node and npm; two minutes.
test-page: venv tests/page/node_modules/installed
	$(BIN)/python -m pytest tests/page -rs

tests/page/node_modules/installed: tests/page/package.json
	if command -v npm >/dev/null; then cd tests/page && \
		npm install --no-package-lock --no-audit --no-fund --loglevel=error; fi
	mkdir -p $(@D)
	touch $@

# PDSERVE_SOAK_MINUTES (30), PDSERVE_SOAK_REQUESTS (10000 at least), PDSERVE_SOAK_SEED (1),
# PDSERVE_SOAK_TLS (UCX_TLS): length, course, transport.
soak: venv
	$(BIN)/python -m pytest -m soak -s

# Do the tests notice real mistakes? tests/mutations.toml, a quarter of an hour.
mutate: venv
	$(BIN)/python tests/mutations.py --out benchmarks/results/mutations.md

# Does this tree answer as an earlier commit does, bit for bit? make golden OLD=main~1;
# five minutes.
golden: venv
	$(BIN)/python tests/golden.py $(OLD)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
