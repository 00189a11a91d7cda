# Two commands do everything on a fresh machine: `make demo` and `make test`. Both use .venv.
PYTHON ?= python3
VENV := .venv/bin/python

.PHONY: demo test check learn bench

demo: .venv/ready  ## per-step branch exploration on the shipped tiny model
	$(VENV) scripts/train_qwenimage_pr.py --config config/grpo.py:shapes_qwenimage_pr $(ARGS)
	@echo "Look at reward.png and samples.png in the newest folder of runs/."

test: .venv/ready
	$(VENV) -m pytest

check: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

learn: .venv/ready  ## the demo's learning curve, three seeds; takes three times as long
	for seed in 1 2 3; do \
	  $(VENV) scripts/train_qwenimage_pr.py --config config/grpo.py:shapes_qwenimage_pr \
	    --config.seed=$$seed --config.run_name=learn_seed$$seed || exit 1; \
	done

bench: .venv/ready  ## seconds per phase and memory, one JSON line per script
	$(VENV) scripts/bench.py --script train_qwenimage
	$(VENV) scripts/bench.py --script train_qwenimage_pr

.venv/ready: requirements.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flow_grpo needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(VENV) -m pip install --quiet --disable-pip-version-check -e .[test]
	@touch .venv/ready
