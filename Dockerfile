# Two images from one wheel: the router, and a Ray Serve node with the application.
#
#   docker build --target extproc -t prefix-affinity-router .
#   docker build --target fleet -t prefix-affinity-fleet .
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
# Compiles what every request passes through (hatch_build.py).
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY extproc extproc
COPY serve_app serve_app
COPY sim sim
COPY envoy envoy
RUN HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --create-home app

FROM base AS extproc
# What it stands on is locked, each file by its hash.
COPY requirements.lock /opt/requirements.lock
RUN pip install --no-cache-dir --no-deps --require-hashes -r /opt/requirements.lock
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
COPY deploy/ready.py /opt/ready.py
# A fresh volume takes its owner from here.
RUN install --directory --owner=app /bootstrap
USER 1000
ENTRYPOINT ["extproc"]
CMD ["serve"]

FROM base AS fleet
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    for wheel in /wheels/*.whl; do pip install --no-cache-dir "$wheel[fleet]"; done
USER 1000
