"""Kylin V10 hosts with A100. Its glibc 2.28 takes vLLM 0.21.0 at most (docs/guide.md)."""

platform = "kylin-v10"
accelerator = "a100-80g"
engine_release = "0.21.0"
engine_requirements = "locks/vllm-0.21.0-kylin-v10-x86_64.txt"

# 2048 tokens are all that the example's tiny model takes: write what your requests need.
instances = [
    {
        "name": "main",
        "port": 8000,
        "devices": [0, 1],
        "tensor_parallel_size": 2,
        "options": {"max-model-len": 2048, "gpu-memory-utilization": 0.9},
    },
]
