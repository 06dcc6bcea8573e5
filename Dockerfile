# syntax=docker/dockerfile:1
# The image of every Ray pod: `docker build --target cpu .` or `--target gpu`. docs/kubernetes.md has the whole command.
# Give PYTHON_IMAGE by digest, so that the same Dockerfile makes the same image: --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# A virtual environment with the packages of a lock, each checked against its hash, and the project on top.
FROM ${PYTHON_IMAGE} AS build
ARG SOURCE_DATE_EPOCH=0
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/tokenalign

# torch without CUDA is in an index of PyTorch's own: --build-arg PIP_EXTRA_INDEX_URL=…
FROM build AS build-cpu
ARG PIP_EXTRA_INDEX_URL
COPY k8s/image/cpu.lock /src/
RUN /opt/tokenalign/bin/pip install --no-compile --no-deps --only-binary :all: --require-hashes -r /src/cpu.lock
COPY pyproject.toml README.md LICENSE NOTICE /src/
COPY tokenalign /src/tokenalign
COPY deploy /src/deploy
# Hash-based bytecode: the root is read-only where it runs, and time stamps would make every build another one.
# torch's tests are left out: they hold files of newer Pythons, which 3.11 can't compile.
RUN /opt/tokenalign/bin/pip install --no-compile --no-deps --no-index --no-build-isolation /src \
 && /opt/tokenalign/bin/python -m compileall -q --invalidation-mode unchecked-hash -x /torch/testing/ /opt/tokenalign/lib

FROM build AS build-gpu
COPY k8s/image/gpu.lock /src/
RUN /opt/tokenalign/bin/pip install --no-compile --no-deps --only-binary :all: --require-hashes -r /src/gpu.lock
COPY pyproject.toml README.md LICENSE NOTICE /src/
COPY tokenalign /src/tokenalign
COPY deploy /src/deploy
RUN /opt/tokenalign/bin/pip install --no-compile --no-deps --no-index --no-build-isolation /src \
 && /opt/tokenalign/bin/python -m compileall -q --invalidation-mode unchecked-hash -x /torch/testing/ /opt/tokenalign/lib

# What both images share. Nobody in it is root, and nothing needs to be written outside /tmp, /dev/shm and the home.
FROM ${PYTHON_IMAGE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tokenalign" \
      org.opencontainers.image.description="Classify text against label descriptions that come with the request." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# KubeRay starts Ray from a login shell where it is told to, and Debian's /etc/profile sets PATH anew.
RUN groupadd --gid 10001 tokenalign \
 && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/tokenalign --shell /bin/bash --no-log-init tokenalign \
 && echo "export PATH=/opt/tokenalign/bin:\$PATH" > /etc/profile.d/tokenalign.sh
ENV PATH=/opt/tokenalign/bin:$PATH \
    HOME=/home/tokenalign \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /home/tokenalign
COPY serve_config.yaml /etc/tokenalign/serve_config.yaml
USER 10001:10001
# Kubernetes has probes of its own; what Docker would ask is not the same on a head and on a worker.
HEALTHCHECK NONE
# On Kubernetes the operator gives the command. Alone, it serves on the container's loopback.
CMD ["tokenalign-deploy", "serve", "/etc/tokenalign/serve_config.yaml"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/tokenalign /opt/tokenalign

FROM runtime AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-gpu /opt/tokenalign /opt/tokenalign
