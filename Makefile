# Two commands do everything on a fresh machine: `make demo` and `make test`. Both use .venv.
# `make quick` takes 15 seconds: the tests that compute without training a run or starting a process.
PYTHON ?= python3
VENV := .venv/bin/python
export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
DEMO := $(VENV) scripts/train_qwenimage_nft.py --config config/nft.py:shapes_qwenimage_nft

# One thread, as in the ranks that some tests start; two processes, which share the tests out as they finish. Memory that
# is freed stays with the process: to fetch it from the kernel anew for each tensor takes a tenth of a small run's time.
# Blocks of 32 MB and more go back. Those of a model of full size, each made for a moment and never written, would leave
# an address space of 70 GB, and a process of which no copy can be started.
MALLOC := MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TOP_PAD_=67108864
# Compiled modules are stored, whatever the environment says: tests start some forty processes.
TEST := $(MALLOC) PYTHONDONTWRITEBYTECODE= $(VENV) -m pytest -p no:cacheprovider -n 2 --dist worksteal
QUICK := batching config denoise_with_logprob ema losses rollout sde_with_logprob
# Files that compare numbers, and what the CPU's libraries may be told about its instruction set.
FLOATS = $(shell grep -lE "approx|assert_close|torch\.equal" tests/test_*.py)
# Those that compare floats or take a kernel, and hold on a GPU, too.
ON_GPU := compiled embeddings flash_attention health joint_attention parity policies quantised quantised_linear \
	stepwise
ISAS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=SSE41 ONEDNN_MAX_CPU_ISA=AVX2 \
	MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2 \
	"OPENBLAS_CORETYPE=Haswell MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=default"

.PHONY: demo test test-all quick coverage test-isa test-kernels test-gpu check docs learn bench lock dist test-versions install

demo: .venv/ready  ## DiffusionNFT on the shipped tiny model; ARGS="--config.seed=7"
	$(DEMO) $(ARGS)
	@$(VENV) -m flow_grpo.monitoring.report $$(ls -td runs/*/ | head -n 1)
	@folder=$$(ls -td runs/*/ | head -n 1); echo "Look at $${folder}report.html, $${folder}reward.png and $${folder}samples.png."

install: .venv/ready  ## the environment alone

test: .venv/ready  ## all but those marked slow; ARGS="tests/test_losses.py -x", or ARGS="-n 0" for one process
	OMP_NUM_THREADS=1 $(TEST) -m "not slow" $(ARGS)

test-all: .venv/ready  ## all tests, those of combinations of features, too
	OMP_NUM_THREADS=1 $(TEST) $(ARGS)

quick: .venv/ready  ## closed forms, golden numbers, plans, settings, imports: nothing that trains or starts a process
	OMP_NUM_THREADS=1 $(TEST) $(QUICK:%=tests/test_%.py) $(ARGS)

coverage: .venv/ready  ## which lines the tests run, those of their processes too; longer than `make test-all`. ARGS="tests/test_losses.py"
	OMP_NUM_THREADS=1 $(TEST) --cov --cov-report=term:skip-covered $(ARGS)

test-isa: .venv/ready  ## the tests that compare floats, under every instruction set that the libraries can be held to
	for isa in $(ISAS); do echo "$$isa"; env OMP_NUM_THREADS=1 $$isa $(TEST) $(FLOATS) $(ARGS) || exit 1; done

test-kernels: .venv/ready  ## the GPU's kernels in Triton's interpreter, on any machine; fetches Triton, 1 GB
	$(VENV) -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .venv/triton triton==3.9.0
	PYTHONPATH=.venv/triton:$(PYTHONPATH) TRITON_INTERPRET=1 $(TEST) tests/test_joint_attention.py $(ARGS)

test-browser: .venv/ready  ## the report in a headless Chromium, which has to be in the PATH, at two widths
	OMP_NUM_THREADS=1 $(TEST) -n 0 -rs tests/test_report.py -k browser $(ARGS)

test-gpu: .venv/ready  ## what compares floats or takes a kernel, on a GPU; with its kernels: .venv/bin/pip install -e '.[flash4]'
	$(VENV) -m pytest --gpu -p no:cacheprovider $(ON_GPU:%=tests/test_%.py) $(ARGS)

check: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(VENV) tools/natural_lines.py
	.venv/bin/basedpyright

learn: .venv/ready  ## all algorithms for the same time, with three seeds; hours. ARGS="--only nft branches --seconds 300"
	$(VENV) benchmarks/learn.py train --parallel 2 --seconds 600 $(ARGS)

docs: .venv/ready  ## write the tables and code of docs/ that the program knows
	$(VENV) tools/make_docs.py

bench: .venv/ready  ## seconds per phase and memory, one JSON line
	$(VENV) benchmarks/bench.py $(ARGS)

# The lowest release lies in a folder of its own, before the environment's.
OLD := .venv/lowest
SMOKE := train_qwenimage:grpo.py:shapes_qwenimage train_qwenimage_pr:grpo.py:shapes_qwenimage_pr \
	train_qwenimage_nft:nft.py:shapes_qwenimage_nft train_qwenimage_dpo:dpo.py:shapes_qwenimage_dpo,online \
	train_qwenimage_refl:refl.py:shapes_proxy_qwenimage_refl
test-versions: .venv/ready  ## quick tests and smoke runs with the lowest diffusers that requirements.txt allows
	lowest=$$(sed -n 's/^diffusers>=\([0-9.]*\),.*/\1/p' requirements.txt); \
	$(VENV) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OLD) "diffusers==$$lowest.0"
	PYTHONPATH=$(OLD):$(PYTHONPATH) OMP_NUM_THREADS=1 $(TEST) $(QUICK:%=tests/test_%.py) tests/test_models.py $(ARGS)
	for run in $(SMOKE); do PYTHONPATH=$(OLD):$(PYTHONPATH) $(VENV) scripts/$${run%%:*}.py --config config/$${run#*:},smoke \
		--config.output_dir=$$(mktemp -d) --config.logger=none || exit 1; done

lock: .venv/ready  ## pin what the tests run with, for Python 3.11 and newer: requirements.lock
	$(VENV) -m pip install --quiet --disable-pip-version-check uv
	echo "# Written by make lock. pip install -c requirements.lock -e '.[test]' installs these versions." > requirements.lock
	$(VENV) -m uv pip compile --quiet --universal --python-version 3.11 --extra test --no-header --no-annotate \
		--no-emit-index-url --no-emit-find-links pyproject.toml | sed 's/+cpu//' >> requirements.lock

dist: .venv/ready  ## dist/: a source archive and, built from it, a wheel
	$(VENV) -m pip install --quiet --disable-pip-version-check build
	$(VENV) -m build

.venv/ready: requirements.txt requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and $(TOO_OLD))'
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo $(NO_VENV) >&2; exit 1; }
	test -x $(VENV) || $(PYTHON) -m venv .venv
	test -L .venv || $(VENV) -m pip --version > /dev/null 2>&1 || $(VENV) -m ensurepip > /dev/null  # uv leaves pip out
	test -L .venv || $(VENV) -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[test]'  # a link is another clone's
	@touch $@

TOO_OLD := "flow_grpo needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 demo"
NO_VENV := "$(PYTHON) cannot make virtual environments: install its venv package (on Debian and Ubuntu python3-venv)"
