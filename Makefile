# Every target makes its own .venv when it is missing or when the dependencies have changed.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

export MLFLOW_DISABLE_TELEMETRY := true
# Where it is set, as in some containers, each of a sweep's processes compiles all that it imports:
# 27 s of a core for torch, Ray and MLflow together, instead of once after the installation.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check fix ui chaos bench-overhead compile-check clean

demo: $(INSTALLED)
	$(BIN)/python -m orchestrator sweep conf=quickstart

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not slow"

bench-overhead: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/orchestrator/bench_overhead.py

chaos: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -x tests/orchestrator/test_chaos.py tests/orchestrator/test_interrupts.py

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

ui: $(INSTALLED)
	$(BIN)/python -m orchestrator ui

compile-check: $(INSTALLED)
	$(BIN)/python -m kernels.compile_check

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --editable ".[dev]"
	@# Where it is not fit to run trials, make goes on all the same. All that a sweep imports is
	@# compiled on the way, half a minute of a core that the first one would take otherwise.
	-$(BIN)/python -m orchestrator doctor
	touch $@
