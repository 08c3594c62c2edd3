"""Numbers of a server that vLLM compares when it starts: context, sequences, tokens a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8fleet import catalog
from fp8fleet.errors import OperatorError
from fp8fleet.planner.capacity import settings_of
from fp8fleet.spec import HostSpec, InstanceSpec

_ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_SEQUENCES, _BUDGET, _CHUNKED = "max-num-seqs", "max-num-batched-tokens", "enable-chunked-prefill"


def may_exceed_context(spec: HostSpec, options: Mapping[str, Any]) -> bool:
    """Whether the operator has said that sequences may be longer than config.json says.

    Source: VLLM_ALLOW_LONG_MAX_MODEL_LEN in vllm/envs.py; hf-overrides may change RoPE's scaling.
    """
    allowed = spec.engine_environment.get(_ALLOW_LONG, "0").strip().lower() in ("1", "true")
    return allowed or bool(options.get("hf-overrides"))


def check_limits(spec: HostSpec, instance: InstanceSpec, longest: int | None) -> None:
    """Refuse what vLLM would refuse after its minutes of loading.

    Args:
        longest: tokens that the model takes at most; None: not told.

    Raises:
        OperatorError: max-model-len is above the model's context, or max-num-batched-tokens below
            max-num-seqs (SchedulerConfig.verify_max_model_len in vllm/config/scheduler.py) or,
            without chunked prefill, below max-model-len.
    """
    options, name = instance.options, f"instances: {instance.name}"
    settings = settings_of(spec, options, instance.name)
    length = settings.max_model_len
    if longest and length and length > longest and not may_exceed_context(spec, options):
        raise OperatorError(
            f"{name}: max-model-len {length} is above the model's context of {longest} tokens, with"
            f" which vLLM does not start: set {longest} or less; a model that takes more with other"
            f" RoPE parameters gets them by hf-overrides, or {_ALLOW_LONG} = '1' in"
            " engine_environment"
        )
    budget, told = _budget(spec, instance, settings.max_num_batched_tokens)
    if budget is None:
        return
    if options.get(_SEQUENCES) is not None and settings.max_num_seqs > budget:
        raise OperatorError(
            f"{name}: max-num-seqs {settings.max_num_seqs} is above max-num-batched-tokens, {told},"
            f" with which vLLM does not start: raise {_BUDGET} to at least that, or lower"
            f" {_SEQUENCES}"
        )
    asked = length or longest
    if _is_whole(options) and options.get(_BUDGET) is not None and asked and asked > budget:
        raise OperatorError(
            f"{name}: {_BUDGET} {budget} is below the longest sequence, {asked} tokens, which vLLM"
            f" refuses without chunked prefill: leave {_CHUNKED} on, raise {_BUDGET}, or lower"
            " max-model-len"
        )


def _budget(spec: HostSpec, instance: InstanceSpec, counted: int) -> tuple[int | None, str]:
    """Tokens a step, and how they are told; None: a default that is not known here.

    Source: get_batch_defaults and _set_default_max_num_seqs_and_batched_tokens_args in
    vllm/engine/arg_utils.py.
    """
    options = instance.options
    if options.get(_BUDGET) is not None:
        return counted, f"{counted}"
    # another mode, data parallelism and whole prompts have larger defaults
    if options.get("performance-mode") or options.get("data-parallel-size") or _is_whole(options):
        return None, ""
    if catalog.accelerators()[spec.accelerator or "cpu"].vendor == "cpu":
        counted *= instance.tensor_parallel_size * instance.pipeline_parallel_size
    return counted, f"by default {counted} there"


def _is_whole(options: Mapping[str, Any]) -> bool:
    """Whether prompts are read whole, in one step."""
    return options.get(_CHUNKED) is False or options.get(f"no-{_CHUNKED}") is True
