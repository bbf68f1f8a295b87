# Image of Baton with Ray, for workers, routers and Ray's head. It does not run as root.
#   docker build -t baton .                                    CPU
#   docker build -t baton --build-arg TORCH_BACKEND=cu130 .    CUDA
# Dependencies are installed by hash (requirements.txt). Only torch is chosen by its build, as in the
# Makefile.

FROM python:3.11-slim-bookworm AS build
ARG TORCH_BACKEND=cpu
ARG TORCH=2.13.0
ARG UV=0.13.8
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
RUN python -m venv /opt/baton
COPY requirements.txt /src/requirements.txt
RUN /opt/baton/bin/pip install --quiet --require-hashes -r /src/requirements.txt
RUN python -m venv /opt/uv && /opt/uv/bin/pip install --quiet "uv==$UV" && \
    /opt/uv/bin/uv pip install --quiet --python /opt/baton/bin/python \
      --torch-backend="$TORCH_BACKEND" "torch==$TORCH"
COPY . /src
RUN /opt/baton/bin/pip install --quiet --no-deps --no-build-isolation /src && \
    /opt/baton/bin/pip check

FROM python:3.11-slim-bookworm
ARG TORCH_BACKEND=cpu
# KubeRay's default probes need wget. On a GPU, Triton compiles a C module to launch kernels; this
# image's Python comes with Python.h.
RUN if [ "$TORCH_BACKEND" != cpu ]; then compiler="gcc libc6-dev"; fi && \
    apt-get update && apt-get install -y --no-install-recommends tini wget $compiler && \
    rm -rf /var/lib/apt/lists/* && useradd --create-home --uid 1000 baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH HOME=/home/baton PYTHONUNBUFFERED=1
# Compiled kernels. Like ~/.cache/huggingface, a volume may be mounted here, which gets the owner of
# the folder in the image. Triton loads code from it, so nobody else may write to it.
ENV TRITON_CACHE_DIR=/home/baton/.cache/triton
USER 1000:1000
WORKDIR /home/baton
RUN mkdir -p .cache/huggingface "$TRITON_CACHE_DIR"
ENTRYPOINT ["tini", "--"]
CMD ["baton", "--help"]
