# dl2gpu on the CPU. Traces are mounted, nothing is written to them:
#
#   docker build -t dl2gpu .
#   docker run --rm -v "$PWD/traces:/traces:ro" dl2gpu scan /traces
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY dl2gpu ./dl2gpu
RUN python -m venv /opt/dl2gpu && /opt/dl2gpu/bin/pip install --no-cache-dir .

FROM python:3.12-slim-bookworm
COPY --from=build /opt/dl2gpu /opt/dl2gpu
RUN install -d -o nobody -g nogroup /var/cache/dl2gpu
ENV PATH=/opt/dl2gpu/bin:$PATH NUMBA_CACHE_DIR=/var/cache/dl2gpu
USER nobody
# compiles the kernels, for the type of processor that the image is built on (status 1: it found the
# deadlocks of the demo)
RUN --mount=type=bind,source=datasets/demo,target=/demo dl2gpu scan /demo || [ $? -eq 1 ]
WORKDIR /traces
ENTRYPOINT ["dl2gpu"]
CMD ["--help"]
