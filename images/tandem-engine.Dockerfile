# docker build --file images/tandem-engine.Dockerfile --tag tandem-engine:VERSION .
# The reference engine: the contents of tandem.Dockerfile, and torch with its GPU libraries.
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS build
COPY requirements /requirements
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes --requirement /requirements/build.lock \
 && python -m venv /opt/tandem \
 && /opt/tandem/bin/pip install --no-cache-dir --require-hashes --requirement /requirements/engine.lock
COPY . /src
RUN cd /src && /opt/build/bin/python -m hatchling build -t wheel -d /wheel \
 && /opt/tandem/bin/pip install --no-cache-dir --no-deps --no-index /wheel/*.whl \
 && /opt/tandem/bin/python -m compileall -q /opt/tandem

FROM ${PYTHON}
RUN groupadd --gid 65532 tandem \
 && useradd --uid 65532 --gid 65532 --home-dir /tmp --no-create-home tandem
COPY --from=build /opt/tandem /opt/tandem
# torch looks up the user name, which has no /etc/passwd entry for an arbitrary UID.
ENV PATH=/opt/tandem/bin:$PATH HOME=/tmp USER=tandem PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
LABEL org.opencontainers.image.title=tandem-engine org.opencontainers.image.licenses=Apache-2.0
