PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
NATIVE := build_native.py $(wildcard planner_svc/native/*.[ch] kernels/ep_kernels/native/*.[ch])

# A mesh is half a dozen processes: each would compile all of moemesh again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test tests-alone tests-together lint-beside soak chaos fuzz load docs lint kernels-aot install clean

serve: $(VENV)/.serve
	@exec $(BIN)/moemesh up --port $(PORT) $(if $(NAME),--set mesh.name=$(NAME))

# Lint takes what the tests leave of the processors; a fault that it finds ends all of it, when the
# tests beside it are done.
test: install
	$(MAKE) --no-print-directory --jobs=2 lint-beside tests-alone

# Those that fill the machine: one by one, when the others are done.
tests-alone: tests-together
	$(BIN)/python -m pytest -m 'alone and not soak' \
		$$(grep -rl --include='test_*.py' 'pytest.mark.alone' tests)

# Two at a time: half of the tests wait for processes most of the time. In the order of their
# folders, but for the longest: those that start whole meshes come before many small ones, which
# even out the end.
tests-together: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not soak and not alone'

lint-beside: install
	nice -n 19 $(MAKE) --no-print-directory lint

# What takes too long for every day: hundreds of moves, the whole matrix of faults.
soak: install
	$(BIN)/python -m pytest -m soak -s

# Random kills, stops, scaling and moves under load: SECONDS=600, SEED=1.
chaos: install
	MOEMESH_CHAOS_SECONDS=$(or $(SECONDS),600) MOEMESH_CHAOS_SEED=$(or $(SEED),1) \
		$(BIN)/python -m pytest -m '' -s tests/fault/test_chaos.py -k long

# Coverage-guided fuzzing of one decoder, or one after another: DECODER=bundle SECONDS=60.
fuzz: install
	$(BIN)/python -m pip install --quiet --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz.atheris_run '$(DECODER)' -max_total_time=$(or $(SECONDS),60)

# Clients on a fresh mesh for SECONDS; table, CSV and HTML in bench/results/load.
load: install
	$(BIN)/python -m tests.load.run --seconds $(or $(SECONDS),120) --users $(or $(USERS),8) \
		--rate $(or $(RATE),1)

# The pages that are made from the code.
docs: install
	$(BIN)/python -m compose.docs

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Compiles the Triton kernels for sm_80, sm_90 and sm_100 (no GPU needed): fails on a spill in a hot
# kernel, and writes the table in the document.
kernels-aot: install
	$(BIN)/python -m ep_kernels.triton.aot docs/kernels.md

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
