"""Texts of the files that land on hosts: Jinja2 templates, YAML options, environment files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fp8fleet import manifest as manifest_module
from fp8fleet.manifest import Manifest

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def template(name: str, values: Mapping[str, Any]) -> str:
    """Render ``templates/<name>``; an undefined variable is an error."""
    return _environment().get_template(name).render(values)


def yaml_text(options: Mapping[str, Any]) -> str:
    """A server's options as the YAML that ``vllm serve --config FILE`` reads."""
    header = "# Options of `vllm serve`, written by fp8fleet; change the inventory instead.\n"
    return header + yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True)


def environment_text(variables: Mapping[str, str]) -> str:
    """Lines of a systemd EnvironmentFile, values in double quotes (systemd.exec(5))."""
    lines = ["# Environment of a server, written by fp8fleet; change the inventory instead."]
    for name, value in variables.items():
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
        lines.append(f'{name}="{escaped.replace("`", chr(92) + "`")}"')
    return "\n".join(lines) + "\n"


def manifest_text(manifest: Manifest, sources: Sequence[str]) -> str:
    """The manifest as it lies on a host, with the sources of the inventory."""
    own = manifest.model_copy(update={"sources": tuple(sources)})
    comment = "Manifest of a model, written by fp8fleet; change models/ or the inventory instead."
    return manifest_module.manifest_text(own, comment)
