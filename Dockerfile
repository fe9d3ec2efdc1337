# One image per role: `docker build --target environment -t fleetbus/environment .`
# Targets: server, tools, environment (no torch), inference, learner, monitor. They run as a user without rights, in /app.
#
# TORCH_INDEX is where the CPU build of torch comes from; PIP_FIND_LINKS, PIP_INDEX_URL are for builds without the internet.
ARG BASE=python:3.11-slim

FROM ${BASE} AS base
ENV PATH=/opt/fleetbus/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
# Volumes take over the owner of what they are mounted on.
RUN useradd --create-home --uid 1000 fleetbus \
    && mkdir -p /app /runs /data /auth/all /auth/server /auth/admin /auth/environment /auth/inference /auth/learner /auth/monitor \
    && chown -R fleetbus:fleetbus /app /runs /data /auth \
    && python -m venv /opt/fleetbus
WORKDIR /src
# Dependencies first, against empty packages: they stay cached when only the source changes.
COPY pyproject.toml README.md constraints.txt ./
RUN mkdir schemas fleetbus workers && touch schemas/__init__.py fleetbus/__init__.py workers/__init__.py \
    && pip install -c constraints.txt .

FROM base AS server-packages
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install -c constraints.txt '.[server]'
FROM base AS tools-packages
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install -c constraints.txt '.[auth]'
FROM base AS environment-packages
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install -c constraints.txt '.[environment]'
FROM base AS monitor-packages
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install -c constraints.txt '.[monitor]'
FROM server-packages AS server
COPY schemas schemas
COPY fleetbus fleetbus
COPY workers workers
RUN pip install --no-deps .
USER fleetbus
WORKDIR /app
ENTRYPOINT ["nats-server"]

FROM tools-packages AS tools
COPY schemas schemas
COPY fleetbus fleetbus
COPY workers workers
RUN pip install --no-deps .
USER fleetbus
WORKDIR /app
ENTRYPOINT ["fleetbus"]

FROM environment-packages AS environment
COPY schemas schemas
COPY fleetbus fleetbus
COPY workers workers
RUN pip install --no-deps .
USER fleetbus
WORKDIR /app
ENTRYPOINT ["fleetbus", "environment"]

FROM monitor-packages AS monitor
COPY schemas schemas
COPY fleetbus fleetbus
COPY workers workers
RUN pip install --no-deps .
USER fleetbus
WORKDIR /app
EXPOSE 8450
ENTRYPOINT ["fleetbus", "monitor", "--host", "0.0.0.0"]

FROM base AS torch-packages
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} '.[environment,torch]'

FROM torch-packages AS learner
COPY schemas schemas
COPY fleetbus fleetbus
COPY workers workers
RUN pip install --no-deps .
USER fleetbus
WORKDIR /app
ENTRYPOINT ["fleetbus", "learner"]

FROM learner AS inference
ENTRYPOINT ["fleetbus", "inference"]

# For GPUs, with vLLM and the torch that it asks for. Needs the NVIDIA container toolkit to run.
FROM base AS inference-vllm
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install '.[vllm]'
COPY schemas schemas
COPY fleetbus fleetbus
COPY workers workers
RUN pip install --no-deps .
USER fleetbus
WORKDIR /app
ENTRYPOINT ["fleetbus", "inference", "--inference-engine", "vllm"]
