# Two commands: `make demo` shows the product on a real training run, `make test` checks everything.
# `make check` is what to run between two edits: everything but the tests marked `slow`, in under three minutes on two cores.
# They make .venv themselves. PYTHON names another interpreter: make demo PYTHON=/usr/bin/python3.12

SHELL := /bin/bash
, := ,
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# DeepSpeed's sdist asks at build time which accelerator there is.
ACCELERATOR := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo DS_ACCELERATOR=cpu)

.PHONY: demo rollout-faults matrix-demo check test whole static lint types imports fast pytest bytecode kills fuzz bench gpu-kit soak figures same families census faults repros findings examples docs pictures site compat frontier hooks clean
# A file's tests share what they build, so a file stays with one process. The files that take longest come first
# (tests/support/heavy.py), the others in the order of the alphabet: so all processes end at about the same time.
# Two processes more than cores: many tests wait, for a hang to be noticed or for a process to end.
PROCESSES ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 2)
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

demo: $(VENV)/.demo
	$(BIN)/actordbg demo

# The eight combinations of flash attention, torch.compile and packing on three dumps: real ones where they are there.
REAL_DUMPS := $(wildcard ../shared/data/input_dumps)
BRING := $(if $(REAL_DUMPS),import $(REAL_DUMPS),create --count 3 --batch-size 2 --seq-len 256)

matrix-demo: $(VENV)/.demo
	store=$$(mktemp -d)/store && $(BIN)/actordbg --store $$store dump $(BRING) && \
	$(BIN)/actordbg --store $$store matrix --where "batch_size*seq_len<1500" --max-inputs 3 --no-backward

# A real PPO with faults planted in the trainer and in the engine, and which command names each: about two hours.
rollout-faults: $(VENV)/.demo
	$(BIN)/python -m benchmarks.faulty_ppo all $${FOLDER:-$$(mktemp -d)/runs}

# Of kills, forks, faults, models and demos `make test` takes a sample; this takes them all.
whole: export WHOLE := 1
whole: export FAULTS := each
whole: export DEMO := all
whole: static pytest

check: static fast

test: static pytest

# What looks at the code without running it, side by side.
static: $(VENV)/.test
	$(MAKE) --jobs --output-sync=target lint types imports site bytecode

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

imports: $(VENV)/.test
	$(BIN)/lint-imports

# Without what a test marked `slow` does: start workers, Ray or torch in another process, or take two seconds.
fast: $(VENV)/.test
	$(PYTEST) -m "not slow"

# At most two tests that fail beside others are tried once more, alone, and named.
pytest: $(VENV)/.test
	rm -f .pytest_cache/v/cache/lastfailed
	$(PYTEST) || $(BIN)/python tests/project/once_more.py $$?

# The tests start a thousand processes, and where PYTHONDONTWRITEBYTECODE is set each would compile what it imports. pytest rewrites
# the asserts of test files: once, here, and not in each of its processes; and again only after a change.
bytecode: $(VENV)/.bytecode

$(VENV)/.bytecode: $(VENV)/.test $(shell find actordbg benchmarks tests -name '*.py')
	$(BIN)/python -m compileall -q actordbg tests/support tests/fuzz benchmarks
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest --collect-only -qq >/dev/null || true
	touch $@

# Each parser under mutated inputs for FUZZ_SECONDS. For some of them only: make fuzz FUZZ="where pickle"
FUZZ_SECONDS ?= 60
FUZZ ?=

fuzz: $(VENV)/.test
	$(BIN)/python tests/fuzz/run.py $(FUZZ) --seconds $(FUZZ_SECONDS)

# pack, unpack, prune, index, upgrades, recover, patch and unpatch, killed at each system call that changes a file (x86-64 Linux).
kills: $(VENV)/.test
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/support OMP_NUM_THREADS=1 $(BIN)/python tests/support/killed_commands.py all
# Calls with faults drawn at random, of which every one must be in the books: make soak CALLS=100000 SEED=1
CALLS ?= 100000
SEED ?=

soak: $(VENV)/.test
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/support $(BIN)/python tests/support/soaking.py $(CALLS) $(SEED)

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks

# A folder for a machine with CUDA and no package index, with all that runs there alone: docs/how-to/gpu-machine.md.
gpu-kit: $(VENV)/.test
	$(BIN)/python -m benchmarks.gpu.make_kit

# The figures of the house. For another checkout beside this one: make figures FIGURES_OF="/path/to/other ."
FIGURES_OF ?= .

figures: $(VENV)/.test
	$(BIN)/python tests/project/figures.py $(FIGURES_OF)

# Did a refactoring change anything? The same commands on the same inputs in two checkouts: make same BEFORE=/path/to/before
BEFORE ?= $(error name the checkout to compare with: make same BEFORE=/path/to/before)

same: $(VENV)/.test
	$(BIN)/python tests/project/same.py $(abspath $(BEFORE)) $(CURDIR)

# Which families of models come out right, on small random models: half a minute of one core for each. What was ended goes on.
families: $(VENV)/.test
	$(BIN)/python -m benchmarks.families --keep .families --output .families.md || test $$? -eq 1
	(printf '<!-- Generated by `make families`: do not edit. -->\n\n'; cat .families.md) > docs/reference/families.md
	rm -rf .families .families.md

# Healthy models of ten families, judged as `check` judges: what is red is a false red. What was ended goes on; half an hour.
CENSUS := benchmarks/census.jsonl

census: $(VENV)/.test
	$(BIN)/python tests/support/census.py $(CENSUS) .census $(SEEDS)

# Seventy-three faults planted in small models, in bf16 and fp32: red or green, the right module, the right cause. Four minutes.
faults: $(VENV)/.test
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/support OMP_NUM_THREADS=1 $(BIN)/python tests/support/plantedfaults.py everything .census

# Twenty of them in environments of their own: reduced, and shown by a script without actordbg. What was ended goes on; an hour.
REPROS := .repros

repros: $(VENV)/.test
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/support OMP_NUM_THREADS=1 $(BIN)/python tests/support/plantedrepros.py $(REPROS)

# What surprised us in other software, run again: findings/README.md. What passed is not run again; an install of each, some minutes.
findings:
	mkdir -p .findings
	for script in findings/*.sh; do \
	  name=$$(basename $$script .sh); test -e .findings/$$name && continue; \
	  if bash $$script > .findings/$$name.log 2>&1; then touch .findings/$$name; echo "as found: $$name"; \
	  else echo "CHANGED: $$name (.findings/$$name.log)"; changed=1; fi; \
	done; test -z "$$changed"

# A store to play with, in examples/store; examples/README.md is the tour.
examples: $(VENV)/.demo
	$(BIN)/python examples/make_store.py

# `git commit` runs ruff, mypy and the import contracts first (.pre-commit-config.yaml).
hooks: $(VENV)/.test
	$(BIN)/pre-commit install

docs: $(VENV)/.test
	$(BIN)/python docs/generate.py

# The pictures of the docs, by the product itself, from real dumps where they are there. It needs a Chromium on PATH.
PICTURES_OF ?= $(REAL_DUMPS)

pictures: $(VENV)/.test
	PYTHONPATH=$(CURDIR) $(BIN)/python docs/pictures.py $(PICTURES_OF)

# Patch, record, replay and compare under five pairs of OpenRLHF and transformers: docs/reference/versions.md. 15 minutes.
compat: $(VENV)/.test
	$(BIN)/python tests/project/compat.py

# What new releases change of that which this project relies on, from their sources alone: RELEASES="transformers==5.24.0 trl==1.16.0".
RELEASES ?= $(error name the releases: make frontier RELEASES="transformers==5.24.0")

frontier: $(VENV)/.test
	$(BIN)/python tests/project/frontier.py $(RELEASES)

# The docs as a site, in build/site/index.html; a link or an anchor that leads nowhere is an error.
site: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# What a replay and OpenRLHF need, with the extras $(1). OpenRLHF requires flash-attn, which cannot be built without CUDA, so it comes
# with --no-deps beside its other requirements (the extras `replay` and `demo`). DeepSpeed is an sdist that imports torch. pip would
# compile one file after the other when all is there: here torch is compiled while the rest is installed, and the rest by all cores.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib

define environment
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned environment into $(VENV) (about 2 GB, a few minutes) ..."
	$(PIP) torch==2.13.0 setuptools wheel packaging ninja
	$(COMPILE) & \
	$(ACCELERATOR) $(PIP) --no-build-isolation deepspeed==0.19.6 && $(PIP) --editable '.[$(1)]' && $(PIP) --no-deps openrlhf==0.11.2; \
	status=$$?; wait; exit $$status
	$(COMPILE) || true  # some packages hold templates, which are no Python
endef

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call environment,replay$(,)demo$(,)plot)
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	$(call environment,replay$(,)demo$(,)plot$(,)dev)
	touch $(VENV)/.demo $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
