# One image for both services: `oncue dispatcher` (the default), `oncue worker`, `oncue migrate`.
#
#   docker build -t oncue .
#
# Handlers of your own: build FROM this image, copy your package to /srv/handlers and set
# ONCUE_HANDLERS. What they need besides is installed, as root, with
#
#   RUN pip --python /opt/oncue/bin/python install ...

FROM python:3.13-slim AS build

WORKDIR /srv/oncue
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/oncue

# The requirements first: they change less often than the code does. Nothing is compiled.
COPY requirements.lock ./
RUN pip --python /opt/oncue/bin/python install --only-binary :all: --require-hashes -r requirements.lock

COPY pyproject.toml README.md ./
COPY oncue oncue
COPY app app
COPY worker worker
COPY alembic alembic
RUN pip --python /opt/oncue/bin/python install --no-deps .


FROM python:3.13-slim

RUN useradd --system --uid 10001 --user-group --create-home oncue && install -d -o oncue /srv/handlers
COPY --from=build /opt/oncue /opt/oncue

ENV PATH=/opt/oncue/bin:$PATH \
    PYTHONPATH=/srv/handlers \
    PYTHONUNBUFFERED=1 \
    ONCUE_HOST=0.0.0.0 \
    ONCUE_WORKER_HOST=0.0.0.0
# Listening beyond loopback, both services refuse to start without ONCUE_INTERNAL_TOKEN, and the
# dispatcher without a key (`oncue keys bootstrap`, or ONCUE_API_KEYS).

USER 10001
WORKDIR /home/oncue
EXPOSE 8080 8081

# A dispatcher answers on one port, a worker on the other. `oncue migrate` ends before it is asked.
# A worker that drains is not ready, and well: it must not be replaced while it ends its runs.
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, sys, urllib.request as web\nfor name, port in (('ONCUE_PORT', 8080), ('ONCUE_WORKER_PORT', 8081)):\n    try:\n        web.urlopen(f'http://127.0.0.1:{os.environ.get(name) or port}/readyz', timeout=1)\n    except web.HTTPError as answer:\n        if b'\"draining\":true' not in answer.read():\n            continue\n    except OSError:\n        continue\n    sys.exit(0)\nsys.exit(1)"]

# oncue is process 1 and gets SIGTERM itself; it ends within ONCUE_GRACE_SECONDS (30).
ENTRYPOINT ["oncue"]
CMD ["dispatcher"]
