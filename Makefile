# Each target sets up .venv when it is missing or older than what it is made from.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
MEGATRON_LATEST := .venv/megatron-latest
TRANSFORMERS_4 := .venv/transformers-4
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint bench docs
demo: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m ep_plugin.launch experiment=demo

test: $(READY) $(MEGATRON_LATEST)/.ready $(TRANSFORMERS_4)/.ready
	$(BIN)/pytest -q -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/ep-bench dispatch --device cpu

# The site in site/: figures, settings and error messages are made from the code.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/hooks.py
	$(BIN)/python -m mkdocs build --strict
	@echo "Read it: $(BIN)/python -m http.server --directory site, then http://localhost:8000"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@echo 'Installing into .venv (a few minutes the first time) ...'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,megatron,dev]'
	touch $@

# The newest megatron-core that the adapter supports, unpacked beside the installed one: its wheels are for newer Pythons
# than the tests may run on, but its Python files are not.
$(MEGATRON_LATEST)/.ready: $(READY)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
		--dest .venv/wheels megatron-core==0.19.2
	$(BIN)/python -m zipfile -e .venv/wheels/megatron_core-0.19.2-*.whl $(MEGATRON_LATEST)
	touch $@

# The last transformers 4, with the packages that it wants older than the installed one does, or that that does not want.
$(TRANSFORMERS_4)/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(TRANSFORMERS_4) \
		transformers==4.57.6 huggingface-hub==0.36.2 tokenizers==0.22.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(TRANSFORMERS_4) requests==2.34.2
	touch $@
