# docker build --file images/tandem-vllm-storage.Dockerfile --tag tandem-vllm-storage:VERSION .
# docker buildx build --platform linux/amd64,linux/arm64 … builds it for both.
# An init container for vLLM's image: it copies TandemStorageConnector and the two libraries that
# vLLM's image lacks to /opt/tandem/python, which PYTHONPATH of the engine's container names.
ARG PYTHON=python:3.12-slim

FROM ${PYTHON} AS build
COPY requirements/vllm-storage.lock /vllm-storage.lock
# Each Python that vLLM supports: a compiled file has the version in its name, so all stand side by
# side.
RUN for python in 3.11 3.12 3.13 3.14; do \
      pip install --no-cache-dir --no-compile --no-deps --only-binary :all: --require-hashes \
        --python-version $python --requirement /vllm-storage.lock --target /wheels/$python \
      && mkdir -p /packages && cp -R /wheels/$python/. /packages || exit 1; \
    done
COPY contract/tandem_contract /packages/tandem_contract
COPY kvstore/tandem_kvstore /packages/tandem_kvstore
COPY vllm_storage/tandem_vllm_storage /packages/tandem_vllm_storage

FROM ${PYTHON}
COPY --from=build /packages /packages
USER 65532:65532
ENTRYPOINT ["cp", "-R", "/packages/."]
CMD ["/opt/tandem/python"]
LABEL org.opencontainers.image.title=tandem-vllm-storage org.opencontainers.image.licenses=Apache-2.0
