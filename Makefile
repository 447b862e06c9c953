# make audit   what one gradient leaks, on the embedded faces: results/audit/report.html
# make audit-all   the same for 19 defenses and chains of them, some seven minutes: results/audit-all/report.html
# make smoke   a few steps of that audit: does it run with this Python and the newest JAX that it can install
# make test    the tests in five minutes; make long   those that compile longer; make slow   of minutes, BUDGET in all
# make frameworks   the tests that need PyTorch, Flower, Opacus or NVFlare; it installs them
# make lint    ruff and mypy
# make docs    the pages: docs/_build/html/index.html; make linkcheck   their links to other sites
# make benchmark   speed beside PyTorch and breaching, as ratios in one run; make benchmark MEASURE=scaling and so on
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
WORKDIR ?= results/audit
MEASURE ?= speed
BUDGET ?= 120
PARALLEL = -n auto --maxprocesses=4 --dist=loadscope
FAST = --attacks='csdlg_fast(tv=1e-6)' --steps=400
FRAMEWORKS = tests/models/test_torch.py tests/models/test_torch_weights.py tests/frameworks tests/launch/test_torch_model.py $\
  tests/federated/test_local_training.py tests/federated/test_losses.py tests/federated/test_pytorch_loops.py $\
  tests/test_examples.py tests/benchmarks $\
  tests/attacks/test_residual_peeling.py::test_a_network_from_pytorch_gives_the_map_that_flax_gives $\
  'tests/docs/test_blocks.py::test_python_runs[docs/guides/from_flower.md]'
DEFENSES = none;clip(norm=1);gaussian(stddev=0.05);laplace(scale=0.02);prune(rate=0.9);topk(ratio=0.1);dgc(ratio=0.1);$\
  fragmentation(ratio=0.4);fragmentation_random(ratio=0.4);soteria(rate=0.6);graddefense(stddev=0.1);$\
  clip_samples(norm=1)+graddefense(stddev=0.1);graddefense_step(stddev=0.1);outpost;concealment;$\
  prune(rate=0.7)+concealment;client_dp(norm=1,noise=0.01);dpsgd(norm=1,noise=0.01);ats;instahide

.PHONY: audit audit-all smoke test long slow frameworks lint docs linkcheck benchmark clean

$(VENV)/.installed: setup.py
	@$(PYTHON) -c '' 2>/dev/null || { echo "there is no Python $(PYTHON) that runs: make PYTHON=python3.12 …"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gradleak needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12 …"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

audit: $(VENV)/.installed
	$(BIN)/python launch/audit.py $(FAST) --workdir=$(WORKDIR)

audit-all: $(VENV)/.installed
	$(BIN)/python launch/audit.py $(FAST) --workdir=results/audit-all --defenses='$(DEFENSES)'

smoke: $(VENV)/.installed
	$(BIN)/python -c 'import sys, jax; print("Python", sys.version.split()[0], "with JAX", jax.__version__)'
	$(BIN)/python launch/audit.py $(FAST) --steps=20 --trials=2 --controls=4 --progress=none --workdir=$$(mktemp -d)

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(PARALLEL)

long: $(VENV)/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m 'long and not slow'

slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow -s --budget=$(BUDGET)

# The lowest PyTorch that is allowed: a newer one is several GB on Linux.
$(VENV)/.frameworks: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[flower]' opacus==1.6.0
	@touch $@

frameworks: $(VENV)/.frameworks
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow' $(FRAMEWORKS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/sphinx-build -W --keep-going -n -b html docs docs/_build/html

linkcheck: $(VENV)/.installed
	$(BIN)/sphinx-build -b linkcheck docs docs/_build/linkcheck

# PyTorch that is there already, of whatever build, is kept. breaching comes without what it asks for: it imports less.
$(VENV)/.benchmark: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[benchmark]' || \
	  echo 'PyTorch could not be installed: what needs it is n/a'
	$(BIN)/python -m pip install --quiet --no-deps breaching==0.1.2 torchvision || \
	  echo 'breaching could not be installed: its row is n/a'
	@touch $@

benchmark: $(VENV)/.benchmark
	$(BIN)/python launch/benchmark.py --measure=$(MEASURE)

clean:
	rm -rf $(VENV) build dist docs/_build docs/_deploy docs/api docs/methods *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
