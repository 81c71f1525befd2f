# Ten targets at most. Each installs what it needs; environments live in .venv and .venvs/ and are built once.
.PHONY: setup demo test test-rdma check check-all bench docs clean
SHELL := /bin/bash
PY := .venv/bin/python
STRATEGY ?= p2p_tcp
DEMO ?=
# What `make demo` runs in besides the core: the environments of the chosen sides.
ROLLOUT := $(if $(findstring rollout=vllm,$(DEMO)),vllm,sglang)

setup:            ## the light core environment and the development tools
	@envs/build.sh core

demo: setup       ## a real trainer, a real engine, three verified syncs; DEMO='trainer=fsdp2 rollout=vllm' for variants
	@envs/build.sh trainer
	@envs/build.sh $(ROLLOUT)
	@$(PY) train.py +weight_sync=$(STRATEGY) $(DEMO)

test: setup       ## every test, each area in the environment of its real component
	@tests/run.sh

check: setup      ## ruff, pyright, import contracts, then the tests
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright
	@.venv/bin/lint-imports
	@tests/run.sh

# Not part of `make test` and CI: the guest is emulated in software. On two cores that others used as well it took 70 to 100 s for
# test_guest.py and 28 min for the 98 tests inside, of which 2 min are until the first one begins.
test-rdma: setup  ## Mooncake and NIXL over real RDMA verbs, in a QEMU guest with soft RoCE (docs/rdma.md); ARGS='-k killed' for some
	@.venv/bin/python -m pytest -q -p no:cacheprovider tests/rdma/test_guest.py
	@$(PY) tests/rdma/run.py -v $(ARGS)

check-all: check test-rdma  ## everything that can be checked on a machine without a GPU

bench: setup      ## the CPU benchmark: shard to shard against gather + broadcast and one big write
	@envs/build.sh trainer
	@.venvs/trainer/bin/python benchmarks/cpu_p2p.py

docs: setup       ## regenerate docs/*.md that are made from code and config
	@$(PY) docs/generate.py
	@$(PY) docs/families.py
	@$(PY) docs/recipes.py

clean:            ## environments and outputs
	rm -rf .venv .venvs outputs .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
