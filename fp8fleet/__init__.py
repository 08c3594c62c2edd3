"""fp8fleet: bare hosts to verified, OpenAI-compatible vLLM FP8 endpoints."""
