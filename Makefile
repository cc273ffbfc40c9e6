# `make demo` and `make test` each work as the first command on a fresh clone.
# Paths are relative on purpose: the clone's own path may contain spaces.

BIN := .venv/bin
# Tests start real daemons and workers; more processes than this mostly wait for each other.
JOBS ?= 2
PYTEST_ARGS ?=

# What `make bench` runs, sized to end in 15 minutes on two cores; more in the scripts' --help.
BENCH_REPLAY ?= --rounds 1 --other-tokens 20 --ways shared private pread
BENCH_SCALE ?= --tokens 240

.PHONY: help setup demo test check lint types imports pytest bench clean

help:
	@echo 'make demo    three agents, one small daemon, one real model; proves exactness'
	@echo 'make test    every check, then every test'
	@echo 'make check   lint, format, types, import rules'
	@echo 'make bench   every benchmark, 15 minutes; results and plots in bench/results/'
	@echo 'make setup   only make .venv'
	@echo 'make clean   remove .venv, caches and build output'

setup:
	@sh tools/setup.sh

# The display goes to stderr; the last line of stdout is one JSON object.
demo: setup
	@$(BIN)/expertctl demo --json

test: check pytest

check: lint types imports

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Twice, so that the branches for the other platform are checked as well.
types: setup
	$(BIN)/mypy --platform linux --cache-dir .mypy_cache/linux
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

imports: setup
	$(BIN)/lint-imports --no-logo

pytest: setup
	$(BIN)/pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

# One that cannot run here (no fio, no control groups) says why, and the others go on.
bench: setup
	@$(BIN)/python bench/hit_path.py --save
	@if command -v fio > /dev/null; then $(BIN)/python bench/read.py --save --rounds 3; \
	else echo 'bench/read.py: fio is not installed'; fi
	@$(BIN)/python bench/resident.py --save --rounds 7
	@$(BIN)/python bench/replay.py --save $(BENCH_REPLAY)
	@$(BIN)/python bench/scale.py --save $(BENCH_SCALE)
	@$(BIN)/python bench/soak.py --save
	@$(BIN)/python bench/prefetch.py --save --rounds 8
	@$(BIN)/python bench/plots.py

clean:
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
