# Two commands do everything from a bare checkout: make train, make test.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: setup train test test-all stress lint peers bench bench-collectives bench-pipeline bench-memory help clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

setup: $(READY) ## Make .venv with the pinned versions and an editable install.

$(READY): pyproject.toml pins.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c pins.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c pins.txt -e '.[examples,dev,hf]'
	@touch $@

train: setup ## Train a GPT on real text over data 2 x pipeline 2 x tensor 2: 8 processes on this CPU.
	$(BIN)/torchrun --standalone --nproc-per-node 8 -m examples.gpt.train --config examples/gpt/config.yaml

# As much as ten minutes hold: all tests but the benchmarks' own, and again on transport torch what moves values. CI
# runs everything on both.
TALKING := $(wildcard tests/test_communicator*.py) tests/test_comm_messages.py tests/test_comm_apart.py \
	tests/test_comm_failures.py

test: setup ## Run the tests of engine and examples, and those that move values on transport torch too.
	$(BIN)/python -m pytest --ignore-glob='tests/test_benchmark_*'
	ENGINE_TRANSPORT=torch $(BIN)/python -m pytest $(TALKING)

test-all: setup ## Run all tests, the benchmarks' too, on transport shm and on torch, as CI does.
	ENGINE_TRANSPORT=shm $(BIN)/python -m pytest
	ENGINE_TRANSPORT=torch $(BIN)/python -m pytest

stress: setup ## Compare the results of ten thousand random calls over shared memory.
	$(BIN)/python -m tests.stress

lint: setup ## Check style, types and who may import whom.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## Time the training step beside its peers (after make peers), about 16 minutes.
	$(BIN)/python -m benchmarks.train_step --standard --rounds 2

bench-collectives: setup ## Measure the collectives beside torch's own, on 2 and 4 ranks, into benchmarks/results.
	@stem=benchmarks/results/$$(date +%F)_collectives; out=$$stem; number=2; \
	while [ -e $${out}_n2.json ] || [ -e $${out}_n4.json ]; do out=$${stem}_$$number; number=$$((number + 1)); done; \
	for n in 2 4; do ( set -x; \
	$(BIN)/python -m benchmarks.collectives --nproc $$n --ops all_reduce,reduce_scatter,all_gather,broadcast,barrier \
		--sizes 1K:64M:4 --dtypes float32 --transports torch,shm --memory private,registered --algorithms torch,chosen \
		--check --ratios --json $${out}_n$$n.json --plot $${out}_n$$n.png ) || exit 1; done

bench-pipeline: setup ## Time the pipeline schedules beside torch's, on 2 and 4 ranks, into benchmarks/results.
	@stem=benchmarks/results/$$(date +%F)_pipeline; out=$$stem; number=2; \
	while [ -e $${out}_n2.json ] || [ -e $${out}_n4.json ]; do out=$${stem}_$$number; number=$$((number + 1)); done; \
	for n in 2 4; do ( set -x; \
	$(BIN)/python -m benchmarks.pipeline --nproc $$n --schedules all --peers torch --overhead \
		--json $${out}_n$$n.json --plot $${out}_n$$n.png ) || exit 1; done

bench-memory: setup ## Measure a rank's memory at every ZeRO stage on 1 to 8 ranks, into benchmarks/results.
	@stem=benchmarks/results/$$(date +%F)_memory; out=$$stem; number=2; \
	while [ -e $$out.json ]; do out=$${stem}_$$number; number=$$((number + 1)); done; set -x; \
	$(BIN)/python -m benchmarks.memory --json $$out.json --plot $$out.png

peers: setup .venv/.peers ## Install what the benchmarks' peers need.

.venv/.peers: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c pins.txt -e '.[peers]'
	@touch $@

clean: ## Remove the environment and everything that runs have written.
	rm -rf .venv runs build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
