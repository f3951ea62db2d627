# `make` lists the targets. The first target you run builds .venv; later runs reuse it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# More arguments for pytest or the benchmarks: make test ARGS='-k fifo -x'
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint types soak chaos smoke bench format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## run the demo
	@$(BIN)/python -m examples.demo

test: $(STAMP) ## run the tests, all but the soak tests
	@$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP) ## check style, formatting and the import contracts
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports

types: $(STAMP) ## check the types
	@$(BIN)/mypy

soak: $(STAMP) ## run the soak tests (minutes)
	@$(BIN)/python -m pytest -m soak $(ARGS)

chaos: $(STAMP) ## run real processes under faults, and judge the history (ARGS='--help')
	@$(BIN)/python -m tests.chaos $(ARGS)

smoke: $(STAMP) ## build the images and run the containers; needs Docker (ARGS='-k beat')
	@$(BIN)/python -m tests.smoke $(ARGS)

bench: $(STAMP) ## measure everything beside what else there is (ARGS='--help')
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-bench.txt
	@$(BIN)/python -m benchmarks $(ARGS)

format: $(STAMP) ## rewrite the code in the project's style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## remove .venv, caches and build output
	@rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -rf build dist server/build server/dist htmlcov .coverage .coverage.*
	@find celery_dflock server tests examples benchmarks -name __pycache__ -type d -prune \
		-exec rm -rf {} + 2>/dev/null || true

# An existing .venv is updated in place; one made by a Python too old or gone is made anew.
$(STAMP): pyproject.toml server/pyproject.toml requirements-dev.txt
	@usable() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }; \
	if ! { usable $(BIN)/python && $(BIN)/python -c 'import pip' 2>/dev/null; }; then \
		found=; \
		for python in "$(PYTHON)" python3.13 python3.12 python3.11; do \
			if usable "$$python"; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "Python 3.11 or newer (with its venv module) is needed, and $(PYTHON) is not: make PYTHON=/path/to/python3.11 ..." >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$found ($$("$$found" -c 'import platform; print(platform.python_version())')) ..."; \
		"$$found" -m venv --clear $(VENV) || exit 1; \
	fi
	@echo "Installing requirements-dev.txt into $(VENV) (a minute the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@echo "Installing dflockd-py and celery-dflock, editable ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e 'server[http,uvloop]' -e .
	@touch $@
