"""Ubuntu hosts with A100: FP8 weights are decompressed when used (W8A16), no FP8 arithmetic."""

platform = "ubuntu-22.04"
accelerator = "a100-80g"
engine_release = "0.33.0"
engine_requirements = "locks/vllm-0.33.0-ubuntu-22.04-x86_64.txt"

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
