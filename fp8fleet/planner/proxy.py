"""Nginx over the servers of a model."""

from __future__ import annotations

from typing import Any

from fp8fleet import render
from fp8fleet.catalog import Platform
from fp8fleet.errors import OperatorError
from fp8fleet.inventory import Fleet, FleetHost
from fp8fleet.plan import NGINX_KEEPALIVE_S, PlannedFile, ProxyPlan
from fp8fleet.planner.files import digest_of, planned_file
from fp8fleet.planner.serving import Serving


def proxy_plan(
    fleet: Fleet, host: FleetHost, platform: Platform, serving: dict[str, Serving]
) -> tuple[ProxyPlan | None, list[PlannedFile]]:
    """Nginx and its configuration; nothing on a host that a gateway or a head stands before."""
    has_gateway = any(other.is_gateway for other in fleet.hosts)
    if has_gateway and not host.is_gateway:
        return None, []
    behind = list(serving.values()) if host.is_gateway else [serving[host.name]]
    if not host.is_gateway and not any(i.has_api for i in serving[host.name].instances):
        return None, []
    if host.is_gateway:
        _check_one_model(serving)
    upstreams = tuple(i.upstream for s in behind for i in s.instances if i.has_api)
    values: dict[str, Any] = {
        "spec": host.spec,
        "upstreams": upstreams,
        "keepalive_timeout": NGINX_KEEPALIVE_S,
        "user": "www-data" if platform.family == "apt" else "nginx",
    }
    digest = digest_of(render.template("nginx/nginx.conf.j2", values | {"digest": ""}))
    files = [planned_file("nginx", "/etc/nginx/nginx.conf", values | {"digest": digest})]
    proxy = ProxyPlan(
        listen=host.spec.nginx_listen,
        status_port=host.spec.nginx_status_port,
        model_id=behind[0].model_id,
        upstreams=upstreams,
        digest=digest,
        api_key=host.spec.api_key,
        address=host.ssh_hostname,
    )
    return proxy, files


def _check_one_model(serving: dict[str, Serving]) -> None:
    """Nginx asks any server for any answer, so that all have to have the same files."""
    remedy = (
        "one gateway serves one model: serve one model, or give each a gateway (an inventory of its"
        " own)"
    )
    names = sorted({own.model_id for own in serving.values()})
    if len(names) != 1:
        raise OperatorError(
            f"the gateway's hosts serve {len(names)} models ({', '.join(names) or 'none'}):"
            f" {remedy}"
        )
    hosts: dict[str, list[str]] = {}
    for host, own in serving.items():
        manifest = own.manifest
        known = f"{manifest.name} {manifest.revision}, digest {manifest.digest[:12]}"
        hosts.setdefault(known, []).append(host)
    if len(hosts) > 1:
        models = "; ".join(f"{known}: {', '.join(on)}" for known, on in hosts.items())
        raise OperatorError(
            f"the gateway's hosts serve {len(hosts)} models as {names[0]!r} ({models}), whose"
            f" answers Nginx would mix: {remedy}"
        )
