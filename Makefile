# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE :=  # what is imported is compiled once, not in every process

.PHONY: demo test slow lint bench soak chaos theory experiments clean

.venv/installed: pyproject.toml constraints.txt src/vafl/kernels/native.c
	$(PYTHON) -m venv .venv
	@rm -f src/vafl/kernels/_native*.so  # else an old one stays where native.c no longer compiles
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: .venv/installed
	$(BIN)/vafl demo --out build/demo

test: .venv/installed lint
	$(BIN)/pytest -n 4 --dist worksteal -m "not slow" --cov --cov-report=term

slow: .venv/installed
	$(BIN)/pytest -m slow

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/installed
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) --out build/bench.json

soak: .venv/installed
	$(BIN)/python -m benchmarks.soak --out build/soak.json

chaos: .venv/installed
	$(BIN)/python -m tests.chaos $(if $(ONLY),--only "$(ONLY)") --out build/chaos.json

theory: .venv/installed
	$(BIN)/python -m experiments.convergence

experiments: .venv/installed
	$(BIN)/python -m experiments $(ONLY) $(if $(DATA),--data $(DATA)) $(if $(QUICK),--quick)

clean:
	rm -rf build .venv
