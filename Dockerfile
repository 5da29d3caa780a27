# dl2gpu as an image: for the CPU (the default) or for NVIDIA GPUs. Traces are mounted, nothing is
# written to them:
#
#   docker build -t dl2gpu .
#   docker build -t dl2gpu:gpu --target gpu --build-arg EXTRA=gpu-cu12 .   (or gpu-cu13)
#   docker run --rm -v "$PWD/traces:/traces:ro" dl2gpu scan /traces
#   docker run --rm --gpus all -v "$PWD/traces:/traces:ro" dl2gpu:gpu scan /traces --engine gpu
#
# DRIVERS names more packages to install, such as the driver of a bucket: --build-arg DRIVERS=s3fs
ARG EXTRA=gpu-cu12
ARG DRIVERS=""

# ---- GPU: the CUDA that the wheels are for, so that the image asks for a driver that serves it.
# "base" is CUDA's runtime alone; all other libraries of CUDA come with the wheels.
FROM nvidia/cuda:12.9.1-base-ubuntu24.04 AS cuda-gpu-cu12
FROM nvidia/cuda:13.0.0-base-ubuntu24.04 AS cuda-gpu-cu13

FROM cuda-${EXTRA} AS gpu-python
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/*

FROM gpu-python AS gpu-build
ARG EXTRA
ARG DRIVERS
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY dl2gpu ./dl2gpu
RUN python3 -m venv /opt/dl2gpu && /opt/dl2gpu/bin/pip install --no-cache-dir ".[${EXTRA}]" ${DRIVERS}

FROM gpu-python AS gpu
COPY --from=gpu-build /opt/dl2gpu /opt/dl2gpu
RUN install -d -o 65534 -g 65534 /var/cache/dl2gpu /reports
ENV PATH=/opt/dl2gpu/bin:$PATH NUMBA_CACHE_DIR=/var/cache/dl2gpu
USER 65534:65534
# there is no GPU while an image is built: this compiles the CPU's kernels only
RUN --mount=type=bind,source=datasets/demo,target=/demo \
    dl2gpu scan /demo --engine cpu --quiet || [ $? -eq 1 ]
WORKDIR /traces
ENTRYPOINT ["dl2gpu"]
CMD ["--help"]

# ---- CPU: last, so that it is what is built when no target is named
FROM python:3.12-slim-bookworm AS cpu-build
ARG DRIVERS
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY dl2gpu ./dl2gpu
RUN python3 -m venv /opt/dl2gpu && /opt/dl2gpu/bin/pip install --no-cache-dir . ${DRIVERS}

FROM python:3.12-slim-bookworm AS cpu
COPY --from=cpu-build /opt/dl2gpu /opt/dl2gpu
RUN install -d -o 65534 -g 65534 /var/cache/dl2gpu /reports
ENV PATH=/opt/dl2gpu/bin:$PATH NUMBA_CACHE_DIR=/var/cache/dl2gpu
# nobody, as a number: Kubernetes has to see that it is not root
USER 65534:65534
# compiles the kernels, for the type of processor that the image is built on (status 1: it found the
# deadlocks of the demo)
RUN --mount=type=bind,source=datasets/demo,target=/demo \
    dl2gpu scan /demo --engine cpu --quiet || [ $? -eq 1 ]
WORKDIR /traces
ENTRYPOINT ["dl2gpu"]
CMD ["--help"]
