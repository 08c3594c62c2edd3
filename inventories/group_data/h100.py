"""Ubuntu hosts with eight H100."""

platform = "ubuntu-22.04"
accelerator = "h100-80g"
engine_release = "0.33.0"
engine_requirements = "locks/vllm-0.33.0-ubuntu-22.04-x86_64.txt"

# 2048 tokens are all that the example's tiny model takes: write what your requests need.
instances = [
    {
        "name": "left",
        "port": 8000,
        "devices": [0, 1, 2, 3],
        "tensor_parallel_size": 4,
        "options": {"max-model-len": 2048, "gpu-memory-utilization": 0.9},
    },
    {
        "name": "right",
        "port": 8001,
        "devices": [4, 5, 6, 7],
        "tensor_parallel_size": 4,
        "options": {"max-model-len": 2048, "gpu-memory-utilization": 0.9},
    },
]
