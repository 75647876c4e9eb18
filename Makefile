# One command for people and CI. `make help` lists the targets.
#
#   LLAMA_NATIVE=1     llama.cpp for this machine's instruction set instead of the AVX2 baseline
#   HTTP_PORT=8080     port of the gateway for `make up` (NATS_PORT, REDIS_PORT likewise)
#   STACK_ARGS="..."   more options of `make up`: --verifiers 2
#   FOLLOW=1           `make logs` goes on with what comes; PROCESS=batcher-0 shows one process alone
#   PAIR=smollm2       model pair for demo (there smollm2-hi unless said), compare, grid and up
#   ENGINE=vllm        up and demo with the target on vLLM (an environment of its own, 3.5 GB; demo then with smollm2)
#   JSON=FILE          report of compare, grid or simulate; ARGS="--resume --rtt-ms 100" are more options of theirs

SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := help
PYTHON ?= python3
PAIR ?= smollm2
ENGINE ?= llama
COMPOSE ?= docker compose
BUILD ?= docker build
FLAVOUR := $(if $(LLAMA_NATIVE),native,baseline)
READY := .venv/.ready-$(FLAVOUR)
RUN := .venv/bin/python -m
VLLM := .venv-vllm/.ready
STACK_PORTS = $(if $(HTTP_PORT),--http-port $(HTTP_PORT)) $(if $(NATS_PORT),--nats-port $(NATS_PORT)) \
	$(if $(REDIS_PORT),--redis-port $(REDIS_PORT))

.PHONY: help setup setup-vllm test-vllm models demo test lint compare grid simulate up down status logs test-compose clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/:/' | awk -F: '{printf "  make %-14s%s\n", $$1, $$2}'

setup: $(READY)  ## virtual environment, llama.cpp, packages (3 minutes the first time)

$(READY): pyproject.toml constraints.txt deploy/bootstrap.py deploy/build_llama.py deploy/llama.cmake
	@$(PYTHON) deploy/bootstrap.py $(if $(LLAMA_NATIVE),--native)
	@rm -f .venv/.ready-*
	@touch $@

setup-vllm: $(VLLM)  ## environment for vLLM without a GPU (3.5 GB, 4 minutes)

$(VLLM): pyproject.toml constraints-vllm.txt deploy/bootstrap_vllm.py
	@$(PYTHON) deploy/bootstrap_vllm.py
	@touch $@

models: setup  ## fetch and check the model pair
	@.venv/bin/paceline models pull $(PAIR)

demo: PAIR := $(if $(filter vllm,$(ENGINE)),smollm2,smollm2-hi)
demo: models $(if $(filter vllm,$(ENGINE)),setup-vllm)  ## the whole line on this machine, over a 60 ms link, with a table at the end
	@$(RUN) loadgen demo --pair $(PAIR) --engine $(ENGINE)

test: models lint  ## every check and every test
	@.venv/bin/pytest --cov --cov-report=term:skip-covered

test-vllm: models setup-vllm  ## the vLLM engine: its contract, its hooks (minutes)
	@OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/on_vllm -W default
	@.venv/bin/pytest tests/integration/test_exactness.py -k vllm

lint: setup  ## style, types, import rules
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

compare grid simulate: JSON ?= .state/$@.json
compare: models  ## cloud, synchronous, deep and Paceline side by side (half an hour; less with ARGS="--repeats 1")
	@$(RUN) loadgen compare --pair $(PAIR) --rtt-ms 0,60,100 --json $(JSON) $(ARGS)

grid: models  ## every mode over round trips, sessions, temperatures (hours; minutes with ARGS=--quick)
	@$(RUN) loadgen grid --pair $(PAIR) --json $(JSON) $(ARGS)

simulate: setup  ## many sessions on one large accelerator, simulated (5 minutes; seconds with ARGS=--quick)
	@$(RUN) loadgen simulate --json $(JSON) $(ARGS)

up: models $(if $(filter vllm,$(ENGINE)),setup-vllm)  ## start NATS, Redis and the services for work
	@PACELINE_MODEL=$(PAIR) $(RUN) paceline.stack up $(STACK_PORTS) \
		$(if $(filter vllm,$(ENGINE)),--vllm-python .venv-vllm/bin/python) $(STACK_ARGS)

down:  ## stop them
	@$(RUN) paceline.stack down

# 3 says that not all is well, which the text tells; for make it is no error.
status:  ## which processes run, on which ports, and what to do where one is gone
	@$(RUN) paceline.stack status || test $$? -eq 3

logs:  ## the latest lines of every process, by time; FOLLOW=1 goes on, PROCESS=NAME shows one
	@$(RUN) paceline.stack logs $(PROCESS) $(if $(filter-out 0,$(FOLLOW)),--follow)

test-compose: setup  ## build the images, compose up, stream an answer, down and up again
	@$(RUN) tests.e2e.compose --compose "$(COMPOSE)" --build "$(BUILD)"

clean:  ## remove the environment and all caches in this folder (models stay)
	@rm -rf .venv .venv-vllm .cache .state .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
