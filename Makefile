# Two commands do everything on a fresh machine: `make demo` and `make test`. Both use .venv.
PYTHON ?= python3
VENV := .venv/bin/python
TRAIN := $(VENV) scripts/train_qwenimage_pr.py --config config/grpo.py:shapes_qwenimage_pr

.PHONY: demo test check learn bench

demo: .venv/ready  ## per-step branch exploration on the shipped tiny model; ARGS="--config.seed=7"
	$(TRAIN) $(ARGS)
	@folder=$$(ls -td runs/*/ | head -n 1); echo "Look at $${folder}reward.png and $${folder}samples.png."

test: .venv/ready  ## ARGS="tests/test_losses.py -x"; one thread, as in the ranks that some tests start
	OMP_NUM_THREADS=1 $(VENV) -m pytest -p no:cacheprovider $(ARGS)

check: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

learn: .venv/ready  ## the demo with three seeds, one after another
	for seed in 1 2 3; do $(TRAIN) --config.seed=$$seed --config.run_name=learn_seed$$seed $(ARGS) || exit 1; done
	@for seed in 1 2 3; do $(VENV) -c "$$SUMMARY" "$$(ls -td runs/learn_seed$$seed*/ | head -n 1)"; done

bench: .venv/ready  ## seconds per phase and memory, one JSON line
	$(VENV) scripts/bench.py $(ARGS)

.venv/ready: requirements.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and $(TOO_OLD))'
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo $(NO_VENV) >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(VENV) -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

TOO_OLD := "flow_grpo needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 demo"
NO_VENV := "$(PYTHON) cannot make virtual environments: install its venv package (on Debian and Ubuntu python3-venv)"

define SUMMARY
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1] + "metrics.jsonl")]
first, *_, last, best = [row for row in rows if row["kind"] == "test"]
before, after, best = first["test/shapes_accuracy"], last["test/shapes_accuracy"], best["test_best/shapes_accuracy"]
print(f"{sys.argv[1]}: strict accuracy on the test prompts {before:.3f} before, {after:.3f} after, {best:.3f} best")
endef
export SUMMARY
