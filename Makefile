# Everything sets itself up in .venv; nothing outside this folder is touched.
SHELL := bash
ROOT_OK := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH" $(ROOT_OK)
PYTEST := $(RUN) python -m pytest --durations=10
NP ?= 5
JOB ?= quick

SEED ?= 1
COUNT ?= 200

.PHONY: train test test-all test-long docs check chaos clean setup

train: .venv/ready  ## five agents, ten games, a few minutes
	$(RUN) mpirun -np $(NP) canal-mpi train --job $(JOB)

test: check .venv-mpich/ready  ## everything that needs only pip
	@failed=0; $(PYTEST) -m "not root and not mpi and not long" -n 2 --dist loadfile || failed=1; \
	$(PYTEST) -m "mpi and not root and not long" || failed=1; exit $$failed

test-all: .venv/dev .venv-mpich/ready  ## what needs root or Debian packages
	tools/debian-packages
	$(PYTEST) -m "root and not long"

test-long: .venv/dev .venv-mpich/ready  ## tests of many minutes, which neither test nor test-all runs
	$(PYTEST) -m long

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
