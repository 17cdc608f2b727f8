# SPDX-License-Identifier: Apache-2.0
# Each target sets up what it needs: Python 3.10 or later, gcc and make are all that must be there before; Go 1.25
# or later too for those of the pipeline.
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo demo-full test e2e faults releases soak proof lint bench bench-check bench-baseline truth docs constraints clean

help: ## print the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1): Python 3.10 or later is needed; say which with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## the example server under load, watched by torchmem top (DEMO_SECONDS=60)
	@$(PY) examples/demo.py

demo-full: $(READY) ## the same before collector, Prometheus and Jaeger, built with Go at first (DEMO_SECONDS=300)
	@$(PY) examples/demo_full.py

test: $(READY) ## every test without a backend: unit, on the emulated (or real) GPU, end to end
	$(PY) -m pytest --ignore=tests/pipeline $(PYTEST)

e2e: $(READY) ## the pipeline's tests: real collector, Prometheus, Alertmanager, Jaeger, built with Go at first
	$(PY) -m pytest tests/pipeline $(PYTEST)

faults: $(READY) ## everything that may go wrong around this package, each with its promise (docs/RELIABILITY.md)
	$(PY) -m pytest tests/faults $(PYTEST)

soak: $(READY) ## the example server through ten minutes of all that at once (SOAK_SECONDS=600 SOAK_SEED=7)
	@$(PY) tests/soak/soak.py --seconds $(or $(SOAK_SECONDS),600) $(if $(SOAK_SEED),--seed $(SOAK_SEED))

proof: $(READY) ## takes each protection out of a copy, and wants its fault's test to fail (WORDS=fork)
	$(PY) tests/faults/prove.py $(WORDS)

releases: $(READY) ## the oldest and newest of Python, OpenTelemetry, wrapt and torch (LEGS="oldest cuda12")
	$(PY) -m tests.releases $(LEGS) --pytest="$(PYTEST)"

lint: $(READY) ## ruff, pyright in strict mode, what is imported is declared, generated files fresh
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(PY) -m deptry src
	$(PY) docs/generate.py --check
	$(PY) collector-config/prometheus/rules.py --check
	$(PY) collector-config/kubernetes/generate.py --check

bench: $(READY) ## what this package costs, as ratios against a floor in the same run
	@$(PY) -m benchmarks

bench-check: $(READY) ## compare what the paths cost with benchmarks/baseline.json: fails if one is worse
	@$(PY) -m benchmarks --against

bench-baseline: $(READY) ## make what the paths cost now that baseline, for this Python
	@$(PY) -m benchmarks --write-baseline

truth: $(READY) ## headroom and free blocks against the real allocator in 10,000 random states
	$(PY) tests/truth/run.py --states $(or $(STATES),10000)

docs: $(READY) ## write what is generated: docs/METRICS.md, docs/registry/, rules, boards, Kubernetes objects
	$(PY) docs/generate.py
	$(PY) tests/faults/faults.py
	$(PY) collector-config/prometheus/rules.py
	$(PY) collector-config/kubernetes/generate.py
	$(PY) collector-config/grafana/build.py

constraints: $(READY) ## pin what is installed now in constraints.txt
	$(PY) .ci/constraints.py > constraints.txt

clean: ## remove what the targets have built
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis dist
