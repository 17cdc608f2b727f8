# SPDX-License-Identifier: Apache-2.0
# The image that instrumentation.yaml names; OpenTelemetry's operator copies /autoinstrumentation out of it into the
# pod and puts it on PYTHONPATH. From the repository's root:
#   docker build --file collector-config/kubernetes/autoinstrumentation.Dockerfile \
#     --tag registry.example/torchmem/autoinstrumentation-python:0.1.0 .
# Build it with the Python of your servers' images: some of the packages hold compiled parts.
ARG PYTHON=3.11

FROM docker.io/library/python:${PYTHON}-slim AS build
WORKDIR /build
COPY pyproject.toml README.md LICENSE CHANGELOG.md constraints.txt ./
COPY src ./src
# Neither torch nor gRPC: the server has the one, and HTTP does without the other.
RUN pip install --no-cache-dir --constraint constraints.txt --target /autoinstrumentation \
    . opentelemetry-distro opentelemetry-exporter-otlp-proto-http opentelemetry-instrumentation-fastapi

FROM docker.io/library/busybox:1.37.0
COPY --from=build /autoinstrumentation /autoinstrumentation
RUN chmod -R go+rX /autoinstrumentation
USER 1000:1000
