PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
NATIVE := build_native.py planner_svc/native/plan.c kernels/ep_kernels/native/route.c

.PHONY: serve test lint install clean

serve: $(VENV)/.serve
	@exec $(BIN)/moemesh up --port $(PORT) $(if $(NAME),--set mesh.name=$(NAME))

test: install lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.test

$(VENV)/.serve: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cpu]'
	@touch $@

$(VENV)/.test: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cpu,test]'
	@touch $(VENV)/.serve $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
