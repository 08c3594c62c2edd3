"""What a host's workload makes of its servers: their options, and the servers themselves."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8fleet import catalog
from fp8fleet.architecture import longest_context, read_architecture, text_config
from fp8fleet.capacity import Capacity
from fp8fleet.catalog_check import Target, check
from fp8fleet.config_json import Config
from fp8fleet.errors import OperatorError
from fp8fleet.lengths import Lengths, read_lengths, stated_lengths
from fp8fleet.planner.capacity import capacity_of, settings_of
from fp8fleet.planner.limits import may_exceed_context
from fp8fleet.spec import HostSpec, InstanceSpec
from fp8fleet.speed import work_of
from fp8fleet.stored import StoredCheckpoint
from fp8fleet.tensor_parallel import tensor_parallel
from fp8fleet.topology import Topology
from fp8fleet.workload import (
    BUDGET,
    FIXED,
    MODEL_LEN,
    SEQUENCES,
    TENSOR_PARALLEL,
    Choice,
    Chosen,
    DoesNotFit,
    Server,
    Workload,
    choose,
    lay_out,
)

_FIRST_PORT = 8000
_ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""Where a config.json says how many experts a token passes."""


@dataclass(frozen=True)
class Decision:
    """A host's servers as they shall be."""

    spec: HostSpec
    """With the servers and options that are chosen."""
    choices: Mapping[str, tuple[Choice, ...]]
    """By server."""
    warnings: Mapping[str, tuple[str, ...]]
    """By server."""


@dataclass(frozen=True)
class Model:
    """What is known of the model that a host serves."""

    config: Config | None
    checkpoint: StoredCheckpoint | None
    """None: headers.json or config.json is not there."""

    @property
    def context(self) -> int | None:
        """Tokens that a sequence may have; None: not told."""
        return read_architecture(self.config).context if self.config else None

    @property
    def longest(self) -> int | None:
        """Tokens above which no release takes max-model-len; None: not told."""
        return longest_context(self.config) if self.config else None

    @property
    def active_experts(self) -> int | None:
        """Experts that a token passes; None: not told."""
        part = text_config(self.config or {})
        counts = (part.get(key) for key in _ACTIVE_EXPERTS)
        return next((count for count in counts if type(count) is int and count > 0), None)


def decide(
    spec: HostSpec, model: Model, target: Target, topology: Topology | None, root: Path
) -> Decision:
    """Choose what the inventory leaves open; without a workload nothing is.

    Raises:
        OperatorError: the workload is beyond the model, the memory, or its file is broken.
    """
    if not spec.has_workload:
        return Decision(spec, {}, {})
    workload = _workload(spec, root)
    try:
        if spec.instances:
            return _with_options(spec, model, target, workload)
        return _with_servers(spec, model, target, workload, topology)
    except OperatorError as error:
        raise OperatorError(f"workload: {error}") from None


def _workload(spec: HostSpec, root: Path) -> Workload:
    """What the inventory states, over what the workload's name stands for."""
    named = catalog.workloads()[spec.workload] if spec.workload else None
    concurrency = spec.workload_concurrency or (named.concurrency if named else 0)
    goal = spec.workload_latency_goal_ms or (named.latency_goal_ms if named else None)
    return Workload(_lengths(spec, root), concurrency, goal)


def _lengths(spec: HostSpec, root: Path) -> Lengths:
    if spec.workload_lengths:
        return read_lengths(root / spec.workload_lengths)
    named = catalog.workloads()[spec.workload] if spec.workload else None
    prompt = spec.workload_prompt_tokens or (named and named.prompt)
    output = spec.workload_output_tokens or (named and named.output)
    assert prompt and output  # the spec demands them where there is no name
    return stated_lengths(
        (prompt.p50, prompt.p95, prompt.max), (output.p50, output.p95, output.max)
    )


# --- options of servers that are listed ---------------------------------------------------------


def _with_options(spec: HostSpec, model: Model, target: Target, workload: Workload) -> Decision:
    instances, choices, warnings = [], {}, {}
    for instance in spec.instances:
        server = _server(spec, model, target, instance)
        try:
            chosen = choose(workload, server, len(spec.instances))
        except DoesNotFit as error:
            raise OperatorError(
                f"instances: {instance.name}: {error}: raise tensor_parallel_size, share the server"
                " among hosts (group: docs/servers.md), or lower the lengths"
            ) from None
        except OperatorError as error:
            raise OperatorError(f"instances: {instance.name}: {error}") from None
        size = Choice(TENSOR_PARALLEL, instance.tensor_parallel_size, FIXED)
        instances.append(_filled(instance, chosen))
        choices[instance.name] = (size, *chosen.choices)
        larger = ("a larger tensor_parallel_size may come nearer to the goal",) * (not chosen.meets)
        warnings[instance.name] = (*chosen.warnings, *larger)
    return Decision(spec.model_copy(update={"instances": tuple(instances)}), choices, warnings)


def _filled(instance: InstanceSpec, chosen: Chosen) -> InstanceSpec:
    return instance.model_copy(update={"options": {**instance.options, **chosen.options}})


def _server(spec: HostSpec, model: Model, target: Target, instance: InstanceSpec) -> Server:
    size = {
        TENSOR_PARALLEL: instance.tensor_parallel_size,
        "pipeline-parallel-size": instance.pipeline_parallel_size,
    }

    def capacity(options: Mapping[str, Any]) -> Capacity | None:
        return capacity_of(spec, {**options, **size}, instance.name, model.checkpoint)

    accelerator = catalog.accelerators()[spec.accelerator or "cpu"]
    checkpoint = model.checkpoint
    return Server(
        accelerator=spec.accelerator or "cpu",
        release=catalog.vllm_version(spec.engine_release or ""),
        tensor_parallel=instance.tensor_parallel_size,
        context=None if may_exceed_context(spec, instance.options) else model.context,
        fp8_cache=_has_fp8_cache(spec, target),
        capacity=capacity,
        work=work_of(checkpoint, accelerator, model.active_experts) if checkpoint else None,
        fixed=_fixed(spec, instance),
    )


def _fixed(spec: HostSpec, instance: InstanceSpec) -> dict[str, Any]:
    """The operator's options; numbers with units, such as ``32k``, as vLLM reads them."""
    settings = settings_of(spec, instance.options, instance.name)
    numbers = {
        MODEL_LEN: settings.max_model_len,
        SEQUENCES: settings.max_num_seqs,
        BUDGET: settings.max_num_batched_tokens,
    }
    read = {k: v for k, v in numbers.items() if k in instance.options and v is not None}
    return {**instance.options, **read}


def _has_fp8_cache(spec: HostSpec, target: Target) -> bool:
    """Whether no gate refuses it on a GPU."""
    asked = replace(target, kv_cache_dtype="fp8")
    refused = (verdict.gate for verdict in check(spec.engine_release or "", asked))
    return spec.vendor == "nvidia" and "kv-cache" not in refused


# --- servers where none is listed ---------------------------------------------------------------


def _with_servers(
    spec: HostSpec, model: Model, target: Target, workload: Workload, topology: Topology | None
) -> Decision:
    devices = topology.whole_devices if topology else 0
    if not devices:
        raise OperatorError(
            "instances are not set, and neither device_count nor topology says how many devices"
            " there are for servers: set one"
        )
    if model.checkpoint is None:
        raise OperatorError(
            f"instances are not set, and {spec.model_manifest} has no config.json and headers.json"
            " beside it, which tell the size of a server: list instances, or create the manifest"
            " anew"
        )
    if capacity_of(spec, {}, "server", model.checkpoint) is None:
        raise OperatorError(
            f"instances are not set, and what {spec.accelerator} holds of this model is not known"
            " (the catalogue has no memory of it, or config.json does not tell enough), so that no"
            " size can be computed: list instances"
        )
    sizes = _sizes(model.checkpoint)
    layout = lay_out(
        workload,
        devices,
        sizes,
        lambda size: _server(spec, model, target, _instance("server", _FIRST_PORT, size)),
    )
    ports = _free_ports(spec)
    instances = tuple(
        _filled(_instance(f"server-{number}", next(ports), layout.tensor_parallel), layout.chosen)
        for number in range(layout.servers)
    )
    return Decision(
        spec.model_copy(update={"instances": instances}),
        {instance.name: layout.chosen.choices for instance in instances},
        {instance.name: layout.chosen.warnings for instance in instances},
    )


@functools.lru_cache(maxsize=64)
def _sizes(checkpoint: StoredCheckpoint) -> tuple[int, ...]:
    """Those that work; 1 does where the headers do not tell."""
    tensors = checkpoint.different_tensors
    found = tensor_parallel(checkpoint.architecture, checkpoint.quantization, tensors)
    return found.sizes or (1,)


def _instance(name: str, port: int, size: int) -> InstanceSpec:
    return InstanceSpec(name=name, port=port, tensor_parallel_size=size)


def _free_ports(spec: HostSpec) -> Iterator[int]:
    taken: Iterable[int] = {spec.nginx_listen, spec.nginx_status_port, spec.peer_port}
    return (port for port in range(_FIRST_PORT, 65536) if port not in taken)
