# Makes everything from nothing on a fresh Linux x86-64 machine. `make` alone lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup system browser signatures lint test demo demo-aligned bench check-env clean

VENV ?= .venv
# The Python 3.11 to build from; empty takes the first one found.
PYTHON ?=
# Asked for torch, and for torch alone, where the configured pip has no CPU build of it.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
LOCK ?= requirements-cpu.txt
PYTEST_ARGS ?=
# Each has engines of its own; 0 runs all tests in one process, which a debugger needs.
TEST_WORKERS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=

# One thread: two OpenMP threads spin against each other on a busy two-core host, and calls take ten times as long.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(LOCK))
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
WHEELS := --no-deps --only-binary :all:
ON_PATH := export PATH="$$(cd $(VENV) && pwd)/bin:$$PATH"
SAY := say() { echo "make: $$*" >&2; }
# Prints the interpreter behind the shim or the virtual environment: the one on PATH may be the one being replaced.
FIND_PYTHON = for candidate in $(or $(PYTHON),python3.11 /usr/bin/python3.11 python3); do \
	"$$candidate" -c 'import sys; sys.version_info[:2] == (3, 11) and print(sys._base_executable)' 2>/dev/null | \
	grep . && break; done || true

# The environment is finished when BUILT says which lock it holds and for which folder: scripts in it name that folder.
OURS := $(VENV)/.made-by-make
BUILT := $(VENV)/.built
INSTALLED := $(VENV)/.installed
WANTED := $(CURDIR) $(firstword $(shell sha256sum $(LOCK)))
UNFINISHED := $(shell [ -x $(VENV)/bin/python ] && [ "$$(cat $(BUILT) 2>/dev/null)" = "$(WANTED)" ] || echo system)

help:
	@cat <<'END'
	make setup      the pinned environment in $(VENV) (once; 3 GB)
	make demo       GRPO on SmolLM2-135M with the hooks on; DEMO_ARGS="--steps 4" and the like are passed on
	make demo-aligned
	                the same with operators on their references: exactly zero mismatch in every step
	make test       lint, then the whole test suite; PYTEST_ARGS="-k clip" and the like are passed on
	make lint       ruff, mypy, lint-imports
	make bench      every benchmark; BENCH_ARGS=--json for one document each
	make check-env  whether the environment holds exactly what it should
	make clean      removes the environment, caches and build outputs; runs/ stays
	END

setup: $(INSTALLED)

$(INSTALLED): $(BUILT) pyproject.toml setup.py
	@$(PIP) install --quiet --no-deps --no-build-isolation --no-index -e .
	touch $@

$(BUILT): $(UNFINISHED)
	@$(SAY)
	exec 9<$(LOCK) # held to the end: a second make must not empty the folder under the first
	flock --nonblock 9 || { say "waiting for another make that sets up."; flock 9; }
	[ "$$(cat $@ 2>/dev/null)" != "$(WANTED)" ] || exit 0
	python=$$($(FIND_PYTHON))
	if [ ! -e $(OURS) ] && [ -n "$$(ls -A $(VENV) 2>/dev/null)" ]; then
		say "$(VENV) is not empty and was not made by this Makefile: remove it, or name another: make VENV=FOLDER."
		exit 1
	fi
	mkdir -p $(VENV) && touch $(OURS)
	# A package whose installation was cut off passes for installed, so an unfinished environment is begun again.
	find $(VENV) -mindepth 1 -maxdepth 1 ! -path $(OURS) -exec rm -rf {} +
	say "building $(VENV) with $$python: one to two minutes on a warm package cache, 0.8 GB to fetch otherwise."
	"$$python" -m venv $(VENV)
	if ! $(PIP) install $(WHEELS) --timeout 15 --retries 1 "$(TORCH)" 2>$(VENV)/torch.log; then
		say "the configured pip has no $(TORCH); asking $(TORCH_CPU_INDEX)."
		$(PIP) install $(WHEELS) --timeout 10 --retries 1 --index-url "$(TORCH_CPU_INDEX)" "$(TORCH)" || {
			cat $(VENV)/torch.log >&2
			say "no $(TORCH): neither the configured pip nor $(TORCH_CPU_INDEX) gave it;" \
				"run again with a network, or name an index that has it: make setup TORCH_CPU_INDEX=ADDRESS."
			exit 1
		}
	fi
	$(PIP) install $(WHEELS) -r $(LOCK) || { say "$(LOCK) is not installed; once pip can get it all: make again."; exit 1; }
	echo "$(WANTED)" >$@

# Looks for the things themselves, not for packages: they may come from anywhere. CXX is what torch.compile runs.
system:
	@$(SAY)
	missing() { # Debian's name of whatever is not there
		local python; python=$$($(FIND_PYTHON))
		if [ -z "$$python" ]; then
			echo python3.11-venv python3.11-dev
		else
			"$$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3.11-venv
			"$$python" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || echo python3.11-dev
		fi
		echo '#include <cstdlib>' | $(CXX) -x c++ -fsyntax-only - 2>/dev/null || echo g++
		"$${python:-python3}" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || echo libnuma1
	}
	if [ "$$(uname -sm)" != "Linux x86_64" ]; then
		say "this is $$(uname -sm), and the pinned wheels are for Linux x86_64."; exit 1
	fi
	if [ -n "$(PYTHON)" ] && [ -z "$$($(FIND_PYTHON))" ]; then
		say "PYTHON=$(PYTHON) is not a Python 3.11: name one, or leave it out."; exit 1
	fi
	needed=$$(missing | xargs)
	[ -n "$$needed" ] || exit 0
	python=$$($(FIND_PYTHON))
	if [[ "$$needed" == *python* && -n "$$python" && "$$python" != /usr/bin/* ]]; then
		say "$$python lacks ensurepip or Python.h: name a Python 3.11 that has both: make PYTHON=PATH."; exit 1
	fi
	install="apt-get install -y --no-install-recommends $$needed"
	if ! command -v apt-get >/dev/null; then
		say "missing, by Debian's names: $$needed; run 'dnf install -y python3.11-devel gcc-c++ numactl-libs' as root" \
			"or your system's equal, then make again."
		exit 1
	fi
	if [ "$$(id -u)" != 0 ]; then
		say "missing: $$needed; run this, then make again: sudo sh -c 'apt-get update && $$install'"; exit 1
	fi
	say "installing $$needed."
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -q
	if [ -z "$$python" ] && [ -z "$$(apt-cache search --names-only '^python3\.11-venv$$')" ]; then
		say "this system's packages have no Python 3.11 (Ubuntu: add-apt-repository -y ppa:deadsnakes/ppa has it);" \
			"install one, then make again or make PYTHON=PATH."
		exit 1
	fi
	$$install
	[ -z "$$(missing)" ] || { say "still missing after '$$install': $$(missing | xargs)."; exit 1; }

# Page tests skip without a browser, so one that cannot be had is a sentence and no failure. Tried once a checkout.
browser: $(INSTALLED)
	@$(SAY)
	there() { [ -n "$${PAGE_BROWSER:-}" ] || command -v chromium >/dev/null; }
	if ! there && [ ! -e .stamps/browser ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
		mkdir -p .stamps && touch .stamps/browser
		say "installing Chromium for the page tests."
		export DEBIAN_FRONTEND=noninteractive
		apt-get update -q && apt-get install -q -y --no-install-recommends chromium || true
	fi
	there || say "no Chromium, so page tests skip (Debian: apt-get install chromium; elsewhere set PAGE_BROWSER)."

# The CUDA references' calls are checked against the signatures in these wheels; they are read, not installed.
SIGNATURES := .cuda-signatures
signatures: $(INSTALLED)
	@$(SAY)
	[ ! -e $(SIGNATURES)/.tried ] || exit 0
	say "fetching the CUDA packages whose signatures the tests check (100 MB, once)."
	mkdir -p $(SIGNATURES) && touch $(SIGNATURES)/.tried
	$(PIP) download -q $(WHEELS) --timeout 15 --retries 1 -d $(SIGNATURES) flashinfer-python==0.7.4 transformer-engine==2.20.2 || \
		say "they cannot be had now, so the signature tests skip; rm -r $(SIGNATURES) and make test to try again."

lint: $(INSTALLED)
	@$(ON_PATH)
	set -x
	ruff check .
	ruff format --check .
	mypy
	lint-imports

test: lint browser signatures
	@$(ON_PATH) WANDB_MODE="$${WANDB_MODE:-offline}"
	exec python -m pytest -n $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

# Two threads gain a fifth here, and spin against nothing: the recipe asks OpenMP to wait passively.
DEMO_THREADS ?= 2
demo: export OMP_NUM_THREADS = $(DEMO_THREADS)
demo: $(INSTALLED)
	@$(ON_PATH)
	exec python -m mismatch_hooks run recipes/grpo_smollm2/smollm2.yaml --out runs/demo $(DEMO_ARGS)

# The smallest set that is exact on mixed lengths; `align: all` holds by construction and takes three times as long.
ALIGN ?= [attention.kernel, attention.rope_fusion, norm.rmsnorm@rollout, \
	gemm.accumulation:padded_native@rollout, logprob.head_dtype:padded_native@rollout]
demo-aligned: export OMP_NUM_THREADS = $(DEMO_THREADS)
demo-aligned: $(INSTALLED)
	@$(ON_PATH)
	exec python -m mismatch_hooks run recipes/grpo_smollm2/smollm2.yaml --out runs/demo-aligned \
		--set 'mismatch_hooks.align=$(ALIGN)' $(DEMO_ARGS)

bench: $(INSTALLED)
	@$(ON_PATH)
	for file in benchmarks/*.py; do
		echo "== $$file" >&2
		python -m "benchmarks.$$(basename "$$file" .py)" $(BENCH_ARGS)
	done

# What the lock leaves out on purpose is expected to be missed; anything else is a fault.
LEFT_OUT := torchvision|torchaudio|torchcodec|triton|llm|llama-cpp-python
check-env: $(INSTALLED)
	@faults=$$($(PIP) check | grep -vE ' requires ($(LEFT_OUT)), which is not installed|^No broken' || true)
	[ -z "$$faults" ] || { echo "$$faults" >&2; exit 1; }
	echo "make: $(VENV) holds what $(LOCK) says." >&2

clean:
	@$(SAY)
	if [ -e $(OURS) ]; then
		find $(VENV) -mindepth 1 -maxdepth 1 ! -path $(OURS) -exec rm -rf {} +
		rm -rf $(VENV)
	elif [ -e $(VENV) ]; then
		say "$(VENV) was not made by this Makefile and stays."
	fi
	rm -rf .stamps .cuda-signatures .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
