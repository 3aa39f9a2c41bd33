# Needs make, Python 3.11+ and pip's package index. Everything is installed into .venv.

# The constraints were resolved with 3.11, so it comes first. A name may be on PATH and not run.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; \
	done; echo python3)
VENV_PYTHON := .venv/bin/python
ON_CPU := scripts/cpu_env.sh

.DEFAULT_GOAL := help
# Each row of docs/compatibility.md, where tests without an engine run beside both releases.
MATRIX := -m "row or full" -p integration_tests.harness.verdicts
# A process a core, and no more than memory allows: each may hold an engine. Groups are made in
# integration_tests/conftest.py; tests without one are handed out singly.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder

.PHONY: help setup demo test test-matrix test-distributed soak serve bench acceptance limit tune lint \
	clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

setup: ## create .venv, or bring it up to date (a second run installs nothing)
	@$(PYTHON) scripts/setup_cpu.py

demo: setup ## serve SmolLM2 with and without heads, side by side; ARGS="--dtype float32" is passed on
	@$(ON_CPU) $(VENV_PYTHON) -m vllm_bpd.demo $(ARGS)

test: setup ## unit and integration tests; ARGS="-k name" is passed on to pytest
	@$(ON_CPU) $(VENV_PYTHON) -m pytest tests integration_tests -m "not full and not distributed" \
		$(PARALLEL) $(ARGS)

test-matrix: setup ## every row on both runners and releases; writes docs/compatibility.md
	@rm -f build/verdicts-*.json
	@status=0; \
	$(ON_CPU) $(VENV_PYTHON) -m pytest tests integration_tests $(MATRIX) \
		$(PARALLEL) --verdicts=build/verdicts-0.32.json $(ARGS) || status=1; \
	for release in 0.33 0.29; do \
		path=$$($(VENV_PYTHON) -m integration_tests.harness.releases $$release) || \
			{ status=1; continue; }; \
		PYTHONPATH=$$path $(ON_CPU) $(VENV_PYTHON) -m pytest tests $(MATRIX) \
			--verdicts=build/verdicts-$$release.json $(ARGS) || status=1; \
	done; \
	$(VENV_PYTHON) -m integration_tests.compatibility docs/compatibility.md \
		build/verdicts-0.32.json build/verdicts-0.33.json build/verdicts-0.29.json || status=1; \
	exit $$status

test-distributed: setup ## tensor, pipeline and data parallel, over processes and Ray, on CPUs
	@$(ON_CPU) $(VENV_PYTHON) -m pytest integration_tests/distributed \
		integration_tests/test_ray_llm.py tests/vllm_bpd/test_ranks.py \
		$(PARALLEL) $(ARGS)

soak: setup ## mixed traffic for an hour, answers compared; ARGS="--minutes 5" is passed on
	@$(ON_CPU) $(VENV_PYTHON) -m integration_tests.soak $(ARGS)

serve: setup ## OpenAI-compatible server for SmolLM2 with heads; ARGS="--port 8001" is passed on
	@target=$$($(VENV_PYTHON) -m vllm_bpd.demo_target) && \
	exec $(ON_CPU) .venv/bin/vllm serve "$$target" --speculative-config bpd $(ARGS)

bench: setup ## drafters side by side, by load; ARGS="--tuned FILE" is passed on
	@VLLM_CPU_KVCACHE_SPACE=1 $(ON_CPU) $(VENV_PYTHON) -m benchmarks.side_by_side $(ARGS)

acceptance: setup ## acceptance of the shipped heads by category; ARGS is passed on
	@$(ON_CPU) $(VENV_PYTHON) -m benchmarks.acceptance $(ARGS)

limit: setup ## speed reached over the most that is possible, cost of drafting; ARGS is passed on
	@$(ON_CPU) $(VENV_PYTHON) -m benchmarks.limit $(ARGS)

tune: setup ## how far drafting pays on this machine, for SmolLM2; ARGS is passed on
	@target=$$($(VENV_PYTHON) -m vllm_bpd.demo_target) && \
	$(ON_CPU) .venv/bin/vllm-bpd tune "$$target" $(ARGS)

lint: setup ## ruff and mypy, the same as the pre-commit hooks
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean: ## remove .venv and every cache made here (not the exported target)
	rm -rf .venv .venv.lock .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
