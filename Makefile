.DEFAULT_GOAL := help
.PHONY: help setup check format test slow coverage docs bundle dist

help: ## List what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## Install the package with its test tools
	pip install -e '.[test,docs]'

check: ## Lint, format and type checks
	ruff check .
	ruff format --check .
	mypy

format: ## Format the code
	ruff format .
	ruff check --fix .

test: ## The test suite, in two processes
	pytest -n 2 --dist loadfile

slow: ## Commands of the docs, every method with every answer, Flower, kills, wheels
	pytest -m slow

coverage: ## The lines that all tests run, in every process they start
	pytest -n 2 --dist loadfile -m "" --cov --cov-report=term:skip-covered --cov-fail-under=93

docs: ## The documentation site, in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build

bundle: ## Build the Flower bundle
	flwr build

dist: ## Build the wheel and the source distribution, in dist/, and check their metadata
	uv build --quiet
	twine check --strict dist/*
