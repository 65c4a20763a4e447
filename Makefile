# make demo    a job that loses a rank in mid-run, and the same job undisturbed; compares the weights
# make test    the tests
# make check   format, lint, types, layers, house rules
# make bench   the benchmarks (ratios measured in one run; minutes)
#
# The first call sets up .venv; it needs Python 3.11 or newer and a C compiler.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/ready.stamp
BUILT := .venv/plane.stamp
PLANE := setup.py $(wildcard src/keepstep/training/plane/*.c src/keepstep/training/plane/*.h)
ROUNDS ?= 3
SIDE_BY_SIDE ?= -n 2 --dist loadfile

.PHONY: demo test test-long test-exhaustive check format bench clean setup
.DELETE_ON_ERROR:

setup: $(READY) $(BUILT)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || \
		{ echo "a C compiler is needed (Debian, Ubuntu: apt-get install gcc libc6-dev)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ rm -rf .venv; echo "venv failed (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "setting up .venv (PyTorch is large: minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[torch,test]"
	@touch $@

$(BUILT): $(PLANE) $(READY)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

demo: setup
	$(BIN)/python examples/gpt/demo.py

test: setup
	$(BIN)/python -m pytest -m "not long" $(SIDE_BY_SIDE)

test-long: setup
	$(BIN)/python -m pytest -m "long and not exhaustive" $(SIDE_BY_SIDE)

test-exhaustive: setup
	$(BIN)/python -m pytest -m exhaustive $(SIDE_BY_SIDE)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -m "not long" tests/house

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python bench/transport.py
	$(BIN)/python bench/recovery.py --rounds $(ROUNDS)
	$(BIN)/python bench/recovery.py --layouts --planned --rounds $(ROUNDS)
	$(BIN)/python bench/planned_move.py
	$(BIN)/python bench/state_copy.py
	$(BIN)/python bench/warm_up.py
	$(BIN)/python bench/swap_scale.py
	$(BIN)/python bench/recording.py
	$(BIN)/python bench/fleet_scale.py
	$(BIN)/python bench/planner_scale.py
	$(BIN)/python bench/paths.py --steps 12
	$(BIN)/python bench/diagnosis.py
	$(BIN)/python bench/flight_recorder.py
	$(BIN)/python bench/analysis_scale.py

clean:
	rm -rf .venv build dist keepstep-runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src -name '*.egg-info' -prune -exec rm -rf {} +
	find src -name '*.so' -delete
