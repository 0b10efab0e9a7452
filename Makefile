# Two commands do everything on a machine with Python 3.11 and make: `make demo` and `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LIGHT := .venv-light
LENT := .venv-join
SITE := .venv-docs

.PHONY: demo join quick test fuzz guided light-test wheel-test docs-site docs-serve swarm lint format \
	lock clean bench gpu-check gpu-swarm

demo: $(READY)  ## three peers hold one model together; drafts; one is killed in mid-sentence
	$(BIN)/python -m bench.demo

swarm: $(READY)  ## the same swarm, left running until Ctrl-C
	$(BIN)/python -m bench.demo --keep

JOIN ?=
join: $(LENT)/.ready  ## lend this machine, without the packages of tests; JOIN="--gpu 0 --memory 6" says how
	$(LENT)/bin/python -m anabranch join $(JOIN)

quick: $(READY)  ## linters, and the tests of what changed: under two minutes on two cores
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.module_numbers
	$(BIN)/python -m tests.quick

WORKERS ?= 3
test: $(READY)  ## the whole suite; browser tests need Chromium (apt install chromium)
	$(BIN)/python -m pytest -n $(WORKERS)

FUZZ ?= tests
fuzz: $(READY)  ## the suite's laws on other inputs each time, and on 20 times as many
	$(BIN)/python -m pytest -m "property or hypothesis" --hypothesis-profile=fuzz --timeout=0 -n $(WORKERS) $(FUZZ)

LAWS := test_files:test_a_safetensors_header_is_right_or_refused \
	test_files:test_a_tokenizer_is_read_or_refused \
	test_files:test_a_configuration_is_read_by_the_library_or_refused \
	test_entries:test_bytes_are_entries_or_malformed \
	test_entries:test_a_request_to_store_is_followed_as_far_as_it_is_right \
	test_entries:test_an_answer_to_a_search_is_right_records_and_right_places \
	test_words:test_an_address_is_parsed_or_no_address \
	test_words:test_what_a_dial_back_found_is_an_address_of_ours_or_nothing \
	test_frames:test_damaged_frames_follow_one_another_until_one_is_malformed \
	test_frames:test_parts_of_frames_make_frames_or_are_malformed \
	test_records:test_bytes_are_a_record_or_are_refused \
	test_records:test_a_view_draws_routes_of_whatever_is_announced \
	test_records:test_a_strangers_plan_is_reviewed \
	test_records:test_the_health_page_shows_whatever_is_announced
GUIDED_S ?= 60
guided: $(READY)  ## laws of tests/fuzz, led by the code that inputs reach; needs the extra `fuzz`
	set -e; for law in $(LAWS); do \
		$(BIN)/python -m tests.fuzz.guided $${law%%:*} $${law##*:} $(GUIDED_S); done

light-test: $(READY) $(LIGHT)/.ready  ## peers without the daemon, where hivemind is not installed
	! $(LIGHT)/bin/python -c 'import hivemind' 2>/dev/null
	ANABRANCH_LIGHT_PYTHON=$(CURDIR)/$(LIGHT)/bin/python \
		$(BIN)/python -m pytest tests/e2e/test_light_*.py

wheel-test:  ## the wheel in an empty environment: minutes, and 2 GB
	$(PYTHON) -m testing.wheel

docs-site: $(SITE)/.ready  ## the documents as a site with search, in site/
	$(SITE)/bin/mkdocs build

docs-serve: $(SITE)/.ready  ## the same at http://127.0.0.1:8000/, anew whenever a page changes
	$(SITE)/bin/mkdocs serve

lint: $(READY)  ## linter, formatter, types and the contract between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.module_numbers

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

UV ?= uv
TORCH_LINKS ?= https://download.pytorch.org/whl/cpu/torch/
lock: $(READY) $(LIGHT)/.ready  ## the newest versions of what is installed, for good with hashes and for tests (needs uv)
	$(UV) pip compile pyproject.toml --extra quantize --universal --python-version 3.11 --upgrade \
		--generate-hashes --no-annotate --no-header --find-links $(TORCH_LINKS) \
		--constraint locks/torch-cpu.txt --no-emit-package torch --quiet --output-file locks/product.new
	{ head -1 locks/product.txt; cat locks/product.new; } > locks/product.all
	{ head -1 locks/build.txt; awk '/^[^ ]/ { of = /^setuptools==/ } of' locks/product.new; } \
		> locks/build.all
	rm locks/product.new; mv locks/product.all locks/product.txt; mv locks/build.all locks/build.txt
	sed -n 's/^\([^ #]*==[^\]*\).*/\1/p' locks/product.txt > locks/dev.in
	sed -n 's/^\(torch==[^+ ]*\).*/\1/p' locks/torch-cpu.txt >> locks/dev.in
	$(BIN)/python locks/client.py $(VENV) $(LIGHT) > locks/client.new
	mv locks/client.new locks/client.txt
	$(UV) pip compile pyproject.toml --extra dev --extra light --universal --python-version 3.11 \
		--no-annotate --no-header --constraint locks/dev.in --quiet --output-file locks/dev.new
	{ head -2 locks/dev.txt; cat locks/dev.new; } > locks/dev.all
	rm locks/dev.in locks/dev.new; mv locks/dev.all locks/dev.txt

bench: $(READY)  ## speed of local swarms against one process; writes bench/results/local.json
	$(BIN)/python -m bench.speed.local --out bench/results/local.json

gpu-check: $(READY)  ## all that only a GPU can show, in parts; writes bench/results/gpu_check.json
	$(BIN)/python -m bench.gpu.check

SWARM ?=
gpu-swarm: $(READY)  ## a swarm of peers on one GPU; SWARM="--only one killed"; writes bench/results/gpu_swarm.json
	$(BIN)/python -m bench.gpu.swarm --out bench/results/gpu_swarm.json $(SWARM)

$(READY): pyproject.toml locks/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Setting up $(VENV): about 2 GB of packages, some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c 'import tomllib; \
		project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")' \
		> $(VENV)/requirements.txt
	$(BIN)/python -m pip install --quiet --requirement $(VENV)/requirements.txt \
		--constraint locks/dev.txt
	@touch $(READY)

# What `pip install .` brings, in the versions that are tested.
$(LENT)/.ready: pyproject.toml locks/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Setting up $(LENT), which takes some minutes the first time"
	$(PYTHON) -m venv $(LENT)
	$(LENT)/bin/python -m pip install --quiet --upgrade pip
	$(LENT)/bin/python -c 'import tomllib; \
		project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["dependencies"], sep="\n")' > $(LENT)/requirements.txt
	$(LENT)/bin/python -m pip install --quiet --requirement $(LENT)/requirements.txt \
		--constraint locks/dev.txt
	@touch $@

# What `pip install .` brings where hivemind has no wheels, and py-libp2p.
$(LIGHT)/.ready: pyproject.toml $(READY)
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c 'import tomllib; \
		project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		wanted = project["dependencies"] + project["optional-dependencies"]["light"]; \
		print(*(w for w in wanted if not w.startswith(("hivemind", "uvloop"))), sep="\n")' \
		> $(LIGHT)/requirements.txt
	$(LIGHT)/bin/python -m pip install --quiet --requirement $(LIGHT)/requirements.txt \
		--constraint locks/dev.txt
	@touch $@

$(SITE)/.ready: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --upgrade pip
	$(PYTHON) -c 'import tomllib; \
		project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["docs"], sep="\n")' > $(SITE)/requirements.txt
	$(SITE)/bin/python -m pip install --quiet --requirement $(SITE)/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(LIGHT) $(LENT) $(SITE) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
