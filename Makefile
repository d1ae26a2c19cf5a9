# All that one does with Oncue; `make` alone lists it. Nothing but python3 (3.11 or newer) is needed.

PYTHON_IN_VENV := .venv/bin/python
UV = $(shell uv --version >/dev/null 2>&1 && echo uv || echo .uv/bin/uv)
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header pyproject.toml --extra server
CONTRACT = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --group contract

.DEFAULT_GOAL := help
.PHONY: help up test test-contract test-faults test-p8 audit simulate bench bench-compare check verify generate release-api lock clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: ## Run the whole platform here: API and docs on port 8080, state in .oncue/ (ONCUE_* is passed on)
	@tools/bootstrap server
	@exec .venv/bin/oncue up

test: ## Run the test suite; ARGS="-k name" is passed to pytest
	@tools/bootstrap dev
	$(PYTHON_IN_VENV) -m pytest -n 4 --dist loadgroup --ignore tests/contract --ignore tests/docs --ignore tests/image $(ARGS)

test-contract: ## Run generated clients, the fuzzer, every example of the docs, and the image's and compose's commands
	@tools/bootstrap dev
	@tools/bootstrap contract
	$(PYTHON_IN_VENV) -m pytest -n 3 --dist loadgroup tests/contract tests/docs tests/image $(ARGS)

test-p8: ## Kill dispatchers while 200 schedules fire each second for two minutes
	@tools/bootstrap dev
	ONCUE_TEST_P8_SECONDS=120 ONCUE_TEST_P8_SCHEDULES=200 $(PYTHON_IN_VENV) -m pytest -n 0 tests/promises/test_p8_dispatchers_killed.py $(ARGS)

simulate: ## Play SEEDS=2000 simulated clusters (FIRST=1), each ten minutes of faults in seconds; PROCESSES=, SECONDS= bound it; SEED= replays one
	@tools/bootstrap dev
	$(PYTHON_IN_VENV) -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),2000) --first $(or $(FIRST),1)) $(if $(PROCESSES),--processes $(PROCESSES)) $(if $(SECONDS),--seconds $(SECONDS))

FAULTS_ALONE = $(PYTHON_IN_VENV) -m pytest -m faults tests/faults tests/simulation
STORM = $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(JOBS),--jobs $(JOBS))

test-faults: ## Break a running cluster in every way and judge it, then each fault alone; a storm alone: SEED= replays, SECONDS= and JOBS= bound it; a fault alone: ARGS="-k name"
	@tools/bootstrap dev
	$(if $(ARGS),$(if $(strip $(STORM)),$(error ARGS is of the faults alone, SEED, SECONDS and JOBS of a storm: give one or the other)),$(PYTHON_IN_VENV) -m tests.faults.run $(STORM))
	$(if $(ARGS),$(FAULTS_ALONE) $(ARGS),$(if $(strip $(STORM)),,$(FAULTS_ALONE)))

BENCH_FLAGS = $(if $(EMBEDDED),--embedded) $(if $(JSON),--json $(abspath $(JSON)))

bench: ## Measure the platform on private servers in less than five minutes; EMBEDDED=1, JSON=file
	@tools/bootstrap dev
	$(PYTHON_IN_VENV) -m bench.throughput --jobs 5000 $(BENCH_FLAGS)
	$(PYTHON_IN_VENV) -m bench.batch_submit $(BENCH_FLAGS)
	$(PYTHON_IN_VENV) -m bench.latency $(BENCH_FLAGS)
	$(PYTHON_IN_VENV) -m bench.spread $(BENCH_FLAGS)
	$(PYTHON_IN_VENV) -m bench.claim --rows 100000 $(BENCH_FLAGS)
	$(PYTHON_IN_VENV) -m bench.memory $(BENCH_FLAGS)

bench-compare: ## Compare with a FastAPI POST that does nothing and, PEERS=folder, other stacks; ARGS="--rounds 5"
	@tools/bootstrap dev
	@$(if $(PEERS),tools/bootstrap_peers)
	$(PYTHON_IN_VENV) -m bench.compare $(if $(PEERS),--peers $(PEERS)) $(if $(JSON),--json $(abspath $(JSON))) $(ARGS)

check: ## What CI runs first: format, lint, types, import contracts, unit tests
	@tools/bootstrap dev
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	$(PYTHON_IN_VENV) -m pytest -q -n 2 tests/unit

verify: ## Fail when a generated file is stale, or the API breaks clients of the last release
	@tools/bootstrap dev
	$(PYTHON_IN_VENV) -m tools.generate --check
	$(PYTHON_IN_VENV) -m tools.breaking

audit: ## Ask which locked dependencies have known vulnerabilities (needs a network, and says so without)
	@python3 -m tools.audit $(ARGS)

generate: ## Write the generated files anew
	@tools/bootstrap dev
	$(PYTHON_IN_VENV) -m tools.generate

release-api: ## Keep today's OpenAPI documents as those of the release that is being made
	@tools/bootstrap dev
	$(PYTHON_IN_VENV) -m tools.generate --check
	$(PYTHON_IN_VENV) -m tools.breaking --release

lock: ## Choose the newest allowed versions of all dependencies (needs uv, or .uv/ from a set-up)
	$(COMPILE) --upgrade -o requirements.lock
	$(COMPILE) --upgrade --group dev -c requirements.lock -o requirements-dev.lock
	$(CONTRACT) --upgrade -o requirements-contract.lock

clean: ## Remove what can be made again; the platform's state in .oncue/ stays
	rm -rf .venv .venv-contract .venv-bench .uv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
