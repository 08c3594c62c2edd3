"""The vLLM servers of a host: options, environment, unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8fleet import catalog, node, render
from fp8fleet.catalog import Release
from fp8fleet.plan import (
    CONFIG_DIRECTORY,
    NGINX_KEEPALIVE_S,
    RUN_DIRECTORY,
    UNIT_DIRECTORY,
    UNIT_PREFIX,
    InstancePlan,
    ModelPlan,
    PlannedFile,
)
from fp8fleet.planner.environments import target_variables
from fp8fleet.planner.files import (
    cache_directory,
    home_directory,
    key_file,
    planned_file,
    secret_file,
)
from fp8fleet.planner.placement import Placement
from fp8fleet.planner.serving import Serving
from fp8fleet.planner.workload import Decision
from fp8fleet.sampling import sampling_of, sampling_option
from fp8fleet.spec import GENERATION_CONFIG, HostSpec, InstanceSpec


def instance_plan(
    spec: HostSpec,
    release: Release,
    instance: InstanceSpec,
    placement: Placement,
    address: str,
    model_id: str,
    decision: Decision,
    root: Path,
) -> InstancePlan:
    """One server of a host."""
    assert spec.model_manifest
    base = f"{CONFIG_DIRECTORY}/instances/{instance.name}"
    unit = f"{UNIT_PREFIX}{instance.name}.service"
    options: dict[str, Any] = {
        "host": address,
        "port": instance.port,
        "served-model-name": model_id,
        "tensor-parallel-size": instance.tensor_parallel_size,
    }
    if instance.pipeline_parallel_size > 1:
        options["pipeline-parallel-size"] = instance.pipeline_parallel_size
    notes = [*placement.notes]
    if release.shutdown_timeout:
        options["shutdown-timeout"] = spec.drain_timeout
    else:
        notes.append(
            f"vLLM {spec.engine_release} has no --shutdown-timeout:"
            " requests that run when it stops are aborted"
        )
    options.update(instance.options)
    if spec.sampling:
        options[GENERATION_CONFIG] = sampling_option(spec.sampling)
    sampling = sampling_of(options, Path(spec.model_manifest), root)
    warnings = [*decision.warnings.get(instance.name, ()), *sampling.doubts()]
    notes += [f"warning: {text}" for text in warnings]
    return InstancePlan(
        name=instance.name,
        unit=unit,
        address=address,
        port=instance.port,
        devices=placement.devices,
        binding=placement.binding,
        model_id=model_id,
        options=options,
        options_file=f"{base}.yaml",
        environment_file=f"{base}.env",
        key_file=key_file(instance.name) if spec.api_key else None,
        marker=f"{RUN_DIRECTORY}/{instance.name}.ready",
        start_timeout_s=spec.start_timeout,
        warm_up_concurrency=spec.warm_up_concurrency,
        files=(
            *(f"{UNIT_DIRECTORY}/{unit}", f"{base}.yaml", f"{base}.env"),
            *([_node_program(spec)] if instance.group else []),
        ),
        notes=tuple(notes),
        choices=decision.choices.get(instance.name, ()),
        sampling=sampling,
    )


def instance_files(
    spec: HostSpec, own: Serving, instance: InstancePlan, model: ModelPlan
) -> list[PlannedFile]:
    """Unit, options, environment and key of one server."""
    secrets = (spec.api_key,) if spec.api_key else ()
    variables = _instance_environment(spec, own, instance)
    values = {
        "spec": spec,
        "instance": instance,
        "engine": own.engine,
        "model": model,
        "caches": spec.cache_directory,
        "nvidia": catalog.accelerators()[spec.accelerator or ""].vendor == "nvidia",
        "stop_timeout": spec.drain_timeout + 30,
        "run_directory": RUN_DIRECTORY,
        "node_program": _node_program(spec),
    }
    unit_file = f"{UNIT_DIRECTORY}/{instance.unit}"
    files = [
        PlannedFile("vllm", instance.options_file, render.yaml_text(instance.options).encode()),
        PlannedFile(
            "vllm",
            instance.environment_file,
            render.environment_text(variables).encode(),
            mode="600",
            secrets=secrets,
        ),
        planned_file("vllm", unit_file, values, "fp8fleet-instance.service"),
    ]
    if spec.api_key and instance.key_file:
        files.append(secret_file("vllm", instance.key_file, spec.api_key))
    return files


def node_files(spec: HostSpec, own: Serving) -> list[PlannedFile]:
    """The program that starts and ends the nodes of a server together."""
    if not any(instance.node for instance in own.instances):
        return []
    return [PlannedFile("vllm", _node_program(spec), Path(node.__file__).read_bytes())]


def _node_program(spec: HostSpec) -> str:
    return f"{spec.install_directory}/bin/vllm-node.py"


def _instance_environment(spec: HostSpec, own: Serving, instance: InstancePlan) -> dict[str, str]:
    """Variables of a server. Sources: vllm/envs.py; FlashInfer's, DeepGEMM's and Triton's docs."""
    caches = cache_directory(spec)
    variables = {
        "HOME": home_directory(spec),
        "PATH": f"{own.engine.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "XDG_CACHE_HOME": f"{caches}/xdg",
        # vLLM writes some of its files in place, which a server of the same model that starts at
        # the same time would read; the others lock or rename, and servers share what they built
        "VLLM_CACHE_ROOT": f"{caches}/vllm/{instance.name}",
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "FLASHINFER_WORKSPACE_BASE": f"{caches}/flashinfer",
        "DG_JIT_CACHE_DIR": f"{caches}/deep_gemm",
        # longer than Nginx keeps idle upstream connections, or requests meet a closed one: 502
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(NGINX_KEEPALIVE_S + 15),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(spec.start_timeout),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    assert spec.vendor
    if spec.vendor == "nvidia":
        variables["CUDA_HOME"] = own.engine.prefix
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    select = catalog.vendors()[spec.vendor].device_variable
    if select:
        variables[select] = ",".join(str(device) for device in instance.devices)
    variables |= target_variables(spec)
    if instance.node:
        variables["VLLM_HOST_IP"] = instance.node.addresses[instance.node.rank]
    if spec.api_key:
        variables["VLLM_API_KEY"] = spec.api_key.placeholder
    return variables | spec.engine_environment
