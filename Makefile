# `make demo` and `make test` are the two to know. PYTHON=python3.12 make setup chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PARITY_STAMP := $(VENV)/.installed-parity
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: setup test proof mutants faults parity demo docs lint clean

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is too old, specjax needs Python 3.11 or newer; try PYTHON=python3.12 make setup" >&2; exit 2; }
	@# A half-made environment would pass for a whole one next time.
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The stamp is newer than what it was made from, so a second run installs nothing.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,parquet,tensorboard]'
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(PARITY_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[parity]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps speculators hs-connectors
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# Not parity, also where torch is installed: what is tested must not depend on what else is there.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -q -m "not proof and not mutants" --ignore tests/parity

# Exactness, the long part: statistical laws through the jitted loop, and longer certificates.
proof: $(STAMP)
	XLA_FLAGS=--xla_backend_optimization_level=2 $(BIN)/python -m pytest -n 2 -q -m proof

# A test that cannot fail proves nothing: errors planted in the shipped code, each with the test that finds it.
mutants: $(STAMP)
	$(BIN)/python -m pytest -n 2 -qq -m mutants tests/mutants

# Training killed 20 times, each time resumed and compared bit for bit.
faults: $(STAMP)
	$(BIN)/python -m tests.distill.faults

# Against transformers on torch: logits of every family, sampling, a saved draft as its assistant. Against speculators:
# drafts that read hidden states; it asks for older versions of what it needs than work, so what it needs is told above.
parity: $(PARITY_STAMP)
	$(BIN)/python -m pytest -n 2 -q tests/parity

demo: $(STAMP)
	$(BIN)/python experiments/run.py configs/demo.yaml

# Into site/: every link and name is checked, and nothing is fetched.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Leaves runs/ alone: it holds results.
clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache
	find specjax experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +
