# The environment of `make demo` on a CUDA base: docker build -t flow_grpo . && docker run --gpus all flow_grpo make demo
# PyTorch's wheels bring their own CUDA libraries, so the base needs none; the compiler is Triton's. Not built by CI.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /flow_grpo
COPY . .
RUN make install
ENV PATH=/flow_grpo/.venv/bin:$PATH
CMD ["python", "-m", "flow_grpo", "--help"]
