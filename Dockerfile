# arpc with its command-line tools. Everything comes from PyPI and Debian.
#
#   docker build -t arpc .
#   docker run --rm arpc arpc bench --quick
#
# The build argument TORCH chooses the version: docker build --build-arg TORCH=torch==2.13.0 -t arpc .
FROM python:3.12-slim-bookworm

ARG TORCH="torch>=2.8"
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# torch is by far the largest layer, and changes least.
RUN python -m pip install "$TORCH" numpy

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY arpc ./arpc
RUN python -m pip install ".[cli,metrics]"

# A worker needs no privileges.
RUN useradd --create-home worker
USER worker
WORKDIR /home/worker
CMD ["arpc", "--help"]
