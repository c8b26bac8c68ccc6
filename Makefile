# `make demo` sets everything up and runs the main job; `make test` runs every test. Both work from a fresh clone, as root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
IMAGE ?=
# Test processes at once. Files are kept whole, and begun in the order of their names, the long ones first.
TESTERS ?= 2
TEST_OPTIONS := -n $(TESTERS) --dist loadfile --no-loadscope-reorder

# What a worker needs, what one with VMs adds, what the demo, the tests and the benchmarks add.
RUN_PACKAGES := python3 python3-venv fuse3 libfuse3-3 mount diffutils
VM_PACKAGES := qemu-system-x86 qemu-utils busybox-static perl-base e2fsprogs
DEMO_PACKAGES := mmdebstrap skopeo umoci docker-registry ca-certificates
SWIFT_PACKAGES := swift-proxy swift-account swift-container swift-object memcached
TEST_PACKAGES := $(VM_PACKAGES) $(SWIFT_PACKAGES) erofs-utils attr acl podman runc openssl apache2-utils git patch libseccomp2 \
	chromium chromium-driver
BENCH_PACKAGES := casync curl zstd bubblewrap crun nginx-light wrk

.PHONY: demo test quick lint format bench lock clean run-packages vm-packages demo-packages test-packages bench-packages

demo: $(VENV)/ready demo-packages
	@$(COMPILE)
	$(BIN)/python -m scripts.demo $(if $(IMAGE),--image $(IMAGE))

test: $(VENV)/ready-dev demo-packages test-packages
	$(BIN)/python -m pytest $(TEST_OPTIONS)

quick: $(VENV)/ready-dev
	$(BIN)/python -m pytest -q $(TEST_OPTIONS) tests/unit tests/property

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready-dev demo-packages test-packages bench-packages
	@$(COMPILE)
	$(BIN)/python -m bench.chunk_size
	$(BIN)/python -m bench.convert
	$(BIN)/python -m bench.cold_start -n 10 --docs docs/benchmarks
	$(BIN)/python -m bench.read
	$(BIN)/python -m bench.launchers
	$(BIN)/python -m bench.stage
	$(BIN)/python -m bench.vm
	$(BIN)/python -m bench.agent
	$(BIN)/python -m bench.s3
	$(BIN)/python -m bench.serve
	$(BIN)/python -m bench.serve_dedup

run-packages:
	@scripts/packages.sh $(RUN_PACKAGES)

vm-packages:
	@scripts/packages.sh $(VM_PACKAGES)

demo-packages:
	@scripts/packages.sh $(DEMO_PACKAGES)

test-packages:
	@scripts/packages.sh $(TEST_PACKAGES)

bench-packages:
	@scripts/packages.sh $(BENCH_PACKAGES)

# `compat` puts the checkout on the path with a .pth file: no import hook on the start-up path of the command.
INSTALL := $(BIN)/pip install -q --no-deps --no-build-isolation --config-settings editable_mode=compat -e .

# Python compiles modules on first use, unless PYTHONDONTWRITEBYTECODE says not to: then every start would.
COMPILE := $(BIN)/python -m compileall -q imaged fuse stage vmm cli

# What runs, and the build tool that pip needs to install the checkout.
$(VENV)/ready: requirements.lock requirements-build.lock pyproject.toml | run-packages
	@echo "setting up $(VENV)" >&2
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/pip install -q --require-hashes -r requirements.lock -r requirements-build.lock
	@$(INSTALL)
	@touch $@

# And what the tests, the linters and the benchmarks import.
$(VENV)/ready-dev: $(VENV)/ready requirements-dev.lock
	@echo "adding what tests need to $(VENV)" >&2
	@$(BIN)/pip install -q --require-hashes -r requirements-dev.lock
	@touch $@

# Pin every dependency with its hashes; needs pip-tools on the path.
lock:
	pip-compile -q --generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--strip-extras --no-header --allow-unsafe -o requirements.lock pyproject.toml
	pip-compile -q --only-build-deps --all-build-deps --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-emit-trusted-host --strip-extras --no-header --allow-unsafe -o requirements-build.lock pyproject.toml
	pip-compile -q --extra dev --generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--strip-extras --no-header --allow-unsafe -c requirements.lock \
		-o requirements-dev.lock pyproject.toml

clean:
	rm -rf $(VENV) .demo build *.egg-info
