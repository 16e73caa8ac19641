# Everything sets itself up in .venv; nothing outside this folder is touched.
SHELL := bash
ROOT_OK := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH" PYTHONDONTWRITEBYTECODE= $(ROOT_OK)
NP ?= 5
JOB ?= quick

SEED ?= 1
COUNT ?= 200

.PHONY: train test test-all test-long docs check chaos clean setup

train: .venv/ready  ## five agents, ten games, a few minutes
	$(RUN) canal-mpi launch -n $(NP) -- train --job $(JOB)

test: check .venv-mpich/ready  ## lint, types, and every test that is quick and needs only pip
	@$(RUN) tools/test "not root and not slow and not long"

test-all: .venv/dev .venv-mpich/ready  ## tests that are slow, or need root or Debian packages
	tools/debian-packages
	@$(RUN) tools/test "(root or slow) and not long"

test-long: .venv/dev .venv-mpich/ready  ## tests of many minutes, which neither test nor test-all runs
	$(RUN) python -m pytest --durations=10 -m long

docs: .venv/dev  ## the documentation site, build/site; any warning is an error
	tools/docs

check: .venv/dev  ## lint and types
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

chaos: .venv/dev  ## break a short job COUNT times, resume it, compare every bit
	$(RUN) python tools/chaos --seed $(SEED) --count $(COUNT)

setup: .venv/dev .venv-mpich/ready

.venv/ready: pyproject.toml constraints.txt tools/setup
	tools/setup
	touch $@

.venv/dev: .venv/ready
	tools/setup dev
	touch $@

.venv-mpich/ready: .venv/dev
	tools/setup mpich
	touch $@

clean:
	rm -rf .venv .venv-mpich .venv-arm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
