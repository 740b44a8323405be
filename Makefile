# Each target sets .venv up by itself, with uv if it is on PATH, else with venv and pip; see .ci/make-venv.

VENV := .venv
BIN := $(VENV)/bin
JS := tests/clients/js
INSTALL := $(BIN)/python .ci/install.py

# Packages of the image, and the tools that list them, each in an environment of its own.
SBOM := build/sbom
EXTRAS := $(shell sed -n 's/^ARG EXTRAS=//p' Dockerfile)
LISTED := $(SBOM)/image/bin/python

PYTEST := $(BIN)/python -m pytest -p tests.support.progress -o console_output_style=classic \
  --dist loadfile --no-loadscope-reorder

# Tests that need no other programs, and no packages but those of the group dev.
QUICK := tests/formats tests/read tests/write tests/survey tests/icechunk \
  $(foreach name,concurrency configuration datasets docs model settings,tests/test_$(name).py)

# Tests start many processes, each of which would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-quick check bench soak dist sbom faults clean

demo: $(VENV)/.demo
	$(BIN)/shardgate demo $(ARGS)

test: $(VENV)/.dev $(VENV)/.js
	$(PYTEST) -m "not soak" --numprocesses 3 $(ARGS)

test-quick: $(VENV)/.quick
	$(PYTEST) -m "not soak" --numprocesses 2 $(QUICK) $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks $(ARGS)

soak: $(VENV)/.dev $(VENV)/.js
	$(PYTEST) -m soak --numprocesses 2 $(ARGS)

# A wheel from the sdist, as an index builds it; then installed without the checkout.
dist: $(VENV)/.dist
	rm -rf dist
	$(BIN)/python -m build --installer $(if $(shell command -v uv),uv,pip) --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/try_wheel.py dist

# ROOT is the root file system of a built image, as a folder or a tar archive.
sbom: $(SBOM)/.image $(SBOM)/.tools
	$(SBOM)/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-file $(SBOM)/python.cdx.json $(LISTED)
	$(SBOM)/tools/bin/pip-licenses --python $(LISTED) --format markdown \
	  --output-file $(SBOM)/licences.md
ifdef ROOT
	$(SBOM)/tools/bin/debsbom generate --sbom-type cdx --with-licenses --root $(ROOT) \
	  --out $(SBOM)/debian
else
	@echo "The packages of Debian are not listed: make sbom ROOT=image.tar, of docker export."
endif

# A package of which the index knows nothing is a failure too.
faults: $(SBOM)/.image $(SBOM)/.tools
	$(SBOM)/tools/bin/python -m pip --python $(LISTED) freeze --exclude shardgate \
	  >$(SBOM)/requirements.txt
	$(SBOM)/tools/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off \
	  --requirement $(SBOM)/requirements.txt

clean:
	rm -rf dist $(SBOM) $(VENV) .uv demo-data $(JS)/node_modules

$(VENV)/.demo: pyproject.toml $(BIN)/python
	@echo "Installing Shardgate and the packages of its demo into $(VENV) (1 to 3 minutes) ..."
	@$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.quick: pyproject.toml $(BIN)/python
	@echo "Installing Shardgate and the packages of its quick tests into $(VENV) (1 to 3 minutes) ..."
	@$(INSTALL) --editable '.[demo]' --group dev
	@touch $@ $(VENV)/.demo

$(VENV)/.dev: pyproject.toml $(BIN)/python
	@echo "Installing Shardgate, the packages of its tests and other clients into $(VENV) (2 to 5 minutes) ..."
	@$(INSTALL) --editable '.[demo]' --group dev-clients
	@touch $@ $(VENV)/.quick $(VENV)/.demo

$(VENV)/.dist: pyproject.toml $(BIN)/python
	@$(INSTALL) --group dist
	@touch $@

# As the Dockerfile installs them, without pip.
$(SBOM)/.image: pyproject.toml Dockerfile
	@rm -rf $(SBOM)/image
	@mkdir -p $(SBOM)
	@.ci/make-venv $(SBOM)/image
	@$(LISTED) .ci/install.py '.[$(EXTRAS)]'
	@$(LISTED) -m pip uninstall --quiet --yes setuptools pip
	@touch $@

$(SBOM)/.tools: pyproject.toml
	@mkdir -p $(SBOM)
	@.ci/make-venv $(SBOM)/tools
	@$(SBOM)/tools/bin/python .ci/install.py --upgrade --group sbom
	@touch $@

# The tests of JavaScript clients skip themselves where there is no node.
$(VENV)/.js: $(wildcard $(JS)/package.json) $(BIN)/python
	@if command -v npm >/dev/null && [ -f $(JS)/package.json ]; then \
	  echo "Installing the packages of the JavaScript tests into $(JS)/node_modules ..."; \
	  npm install --prefix $(JS) --no-package-lock --no-save --no-audit --no-fund --loglevel=error; \
	fi
	@touch $@

$(BIN)/python:
	@.ci/make-venv $(VENV)
