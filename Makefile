# make demo    train a small net on real data three ways and compare them (examples/train_digits.py)
# make test    run the tests
# make conformance
#              torch's op database and whole models against eager, in minutes: another part of the ops each day, or SHARD=
#              FULL=1 runs all and writes conformance/ops.md and models.md: DEVICE=cpu JOBS=1; it goes on where it was
#              interrupted. More: python -m conformance --help
# make soak    random courses of steps against eager: STEPS=20000 DEVICE=cpu SEED=0 MINUTES=
#
# All make .venv and install into it what constraints.txt pins, once. To use an environment that you have, name its
# interpreter: `make test PYTHON=python`. Then nothing is created or installed, fxgraph itself need not be either.

.PHONY: help demo test conformance soak lint format typecheck env clean
.DEFAULT_GOAL := help

VENV ?= .venv
# Makes .venv; any CPython from 3.10 to 3.13 with the venv module.
BASE_PYTHON ?= python3
DEMO_ARGS ?=
# A file's tests stay together, in order, in one process: the same run every time.
PYTEST_ARGS ?= -n 2 --dist loadfile
STEPS ?= 20000
DEVICE ?= cpu
SEED ?= 0
# Ends the soak after so many minutes, even if STEPS have not been taken.
MINUTES ?=
# Processes of a conformance run, and which cases: i/n, or today/n for another n-th each day.
JOBS ?= 1
SHARD ?= $(if $(FULL),0/1,today/30)
FULL ?=
CONFORMANCE = -m conformance $(1) --device $(DEVICE) --jobs $(JOBS)

ifeq ($(strip $(PYTHON)),)
RUN := $(VENV)/bin/python
ENV := $(VENV)/.installed
else
RUN := $(PYTHON)
ENV :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

demo: $(ENV)
	$(RUN) examples/train_digits.py $(DEMO_ARGS)

test: $(ENV)
	$(RUN) -m pytest $(PYTEST_ARGS)

soak: $(ENV)
	$(RUN) tests/soak.py --steps $(STEPS) --device $(DEVICE) --seed $(SEED) $(if $(MINUTES),--minutes $(MINUTES))

ifeq ($(strip $(FULL)),)
conformance: $(ENV)
	$(RUN) $(call CONFORMANCE,ops) --shard $(SHARD) --samples 2 --minutes 4 --fresh \
	    --results conformance/results/sample-ops-$(DEVICE).jsonl; ops=$$?; \
	$(RUN) $(call CONFORMANCE,models) --only resnet gpt2 lstm gnn-scatter --optimizers fused --minutes 1 --fresh \
	    --results conformance/results/sample-models-$(DEVICE).jsonl && exit $$ops
else
conformance: $(ENV)
	$(RUN) $(call CONFORMANCE,ops) --shard $(SHARD) --dtypes float32 bfloat16 complex64 integer \
	    --variants function inplace mutate --table conformance/ops.md; ops=$$?; \
	$(RUN) $(call CONFORMANCE,models) --shard $(SHARD) --timeout 900 --table conformance/models.md && exit $$ops
endif

lint: $(ENV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(ENV)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

typecheck: $(ENV)
	$(RUN) -m mypy

env: $(ENV)

# The build's own requirement comes first and from the same pins, so that the second step needs no isolated build
# environment, which would take whatever is newest.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(BASE_PYTHON) -m venv --clear $(VENV) || { \
	    rm -rf $(VENV); echo "make: no venv: install Python's venv module (Debian: python3-venv), or name an" \
	    "interpreter that has torch: make $(MAKECMDGOALS) PYTHON=python" >&2; exit 1; }
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt hatchling
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation \
	    --editable '.[examples,test,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
