# docker build --file images/tandem.Dockerfile --tag tandem:VERSION .
# docker build --file images/tandem.Dockerfile --target tandem-epp --tag tandem-epp:VERSION .
# docker build --file images/tandem.Dockerfile --target tandem-sidecar --tag tandem-sidecar:VERSION .
# docker build --file images/tandem.Dockerfile --target tandem-router --tag tandem-router:VERSION .
# Operator, EPP, sidecar, router and the `tandem` command, without torch. The other images have the
# same files and run one command, for charts that pass arguments only, such as llm-d's.
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS build
COPY requirements /requirements
# For the EPP's request path (images/hot_path.py). python:3.11-slim has Python's headers.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes --requirement /requirements/build.lock \
 && python -m venv /opt/tandem \
 && /opt/tandem/bin/pip install --no-cache-dir --require-hashes --requirement /requirements/runtime.lock
COPY . /src
RUN cd /src && /opt/build/bin/python -m hatchling build -t wheel -d /wheel \
 && /opt/tandem/bin/pip install --no-cache-dir --no-deps --no-index /wheel/*.whl \
 && /opt/build/bin/python -m images.hot_path --python /opt/tandem/bin/python \
      $(/opt/tandem/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && /opt/tandem/bin/python -m compileall -q /opt/tandem

FROM ${PYTHON} AS installed
RUN groupadd --gid 65532 tandem \
 && useradd --uid 65532 --gid 65532 --home-dir /tmp --no-create-home tandem
COPY --from=build /opt/tandem /opt/tandem
# torch looks up the user name, which has no /etc/passwd entry for an arbitrary UID.
ENV PATH=/opt/tandem/bin:$PATH HOME=/tmp USER=tandem PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
LABEL org.opencontainers.image.licenses=Apache-2.0

FROM installed AS tandem-epp
LABEL org.opencontainers.image.title=tandem-epp
ENTRYPOINT ["tandem-epp"]

FROM installed AS tandem-router
LABEL org.opencontainers.image.title=tandem-router
ENTRYPOINT ["tandem-router"]

FROM installed AS tandem-sidecar
LABEL org.opencontainers.image.title=tandem-sidecar
ENTRYPOINT ["tandem-sidecar"]

FROM installed AS tandem
LABEL org.opencontainers.image.title=tandem
