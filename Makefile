# Each target sets .venv up by itself, with uv if it is on PATH, else with venv and pip; see .ci/make-venv.

VENV := .venv
BIN := $(VENV)/bin
JS := tests/clients/js
UV := $(shell command -v uv 2>/dev/null)
INSTALL := $(if $(UV),uv pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install -qq)

PYTEST := $(BIN)/python -m pytest -p tests.support.progress -o console_output_style=classic \
  -m "not soak" --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Tests start many processes, each of which would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check bench soak clean

demo: $(VENV)/.demo
	$(BIN)/shardgate demo $(ARGS)

test: $(VENV)/.dev $(VENV)/.js
	$(PYTEST) $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks $(ARGS)

soak: $(VENV)/.dev $(VENV)/.js
	$(BIN)/pytest -m soak --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

clean:
	rm -rf $(VENV) .uv demo-data $(JS)/node_modules

$(VENV)/.demo: pyproject.toml $(BIN)/python
	@echo "Installing Shardgate and the packages of its demo into $(VENV) (1 to 3 minutes) ..."
	@$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(BIN)/python
	@echo "Installing Shardgate and the packages of its tests into $(VENV) (some minutes) ..."
	@$(INSTALL) --editable '.[demo]' --group dev
	@touch $@ $(VENV)/.demo

# The tests of JavaScript clients skip themselves where there is no node.
$(VENV)/.js: $(wildcard $(JS)/package.json) $(BIN)/python
	@if command -v npm >/dev/null && [ -f $(JS)/package.json ]; then \
	  echo "Installing the packages of the JavaScript tests into $(JS)/node_modules ..."; \
	  npm install --prefix $(JS) --no-package-lock --no-save --no-audit --no-fund --loglevel=error; \
	fi
	@touch $@

$(BIN)/python:
	@.ci/make-venv $(VENV)
