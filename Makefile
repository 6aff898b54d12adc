# Each target sets up .venv when it is missing or older than what it is made from.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint bench
demo: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m ep_plugin.launch experiment=demo

test: $(READY)
	$(BIN)/pytest -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/ep-bench dispatch --device cpu

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@echo 'Installing into .venv (a few minutes the first time) ...'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,megatron,dev]'
	touch $@
