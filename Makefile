# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv from constraints.txt first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-long lint suite bench predictions documents site clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Types take one core a minute; meanwhile the tests begin.
test: $(STAMP)
	$(MAKE) --no-print-directory -j 2 lint suite

# Tests start many processes; without bytecode each of them would compile the package again.
suite: $(STAMP)
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every cell of the matrices of which the ordinary suite runs a diagonal.
test-long: $(STAMP)
	$(BIN)/python -m pytest -m long

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory site

# The documentation as a site; a link that leads nowhere is an error.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/python -m bench $(NAME)

# What is predicted now beside what was stored: make predictions; make predictions STORE="why" stores it.
predictions: $(STAMP)
	$(BIN)/python -m bench.predictions $(CASES) $(if $(STORE),--store "$(STORE)")

# What documents take from the code: outputs of commands, results, commands.md, reference.md.
documents: $(STAMP)
	$(BIN)/python -m bench.documents

clean:
	rm -rf $(VENV) build dist site *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
