"""What Nginx runs."""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra.api import FactBase


@dataclass(frozen=True)
class NginxState:
    """Whether Nginx runs and starts at boot, and the digest of the configuration it serves."""

    active: bool
    enabled: bool
    digest: str | None


class Nginx(FactBase[NginxState]):
    """Nginx's unit, and the configuration that it says is live on its status port."""

    def command(self, status_port: int) -> str:
        live = f"curl -s --max-time 5 --noproxy '*' http://127.0.0.1:{status_port}/live"
        return (
            "systemctl show nginx.service -p ActiveState,UnitFileState; "
            f'echo "Live=$({live} 2>/dev/null)"'
        )

    @staticmethod
    def default() -> NginxState:
        return NginxState(False, False, None)

    def process(self, output: list[str]) -> NginxState:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        return NginxState(
            values.get("ActiveState") == "active",
            values.get("UnitFileState") == "enabled",
            values.get("Live") or None,
        )


class OurNginxRuns(FactBase[bool]):
    """Whether an Nginx with a configuration of fp8fleet runs or starts at boot."""

    def command(self) -> str:
        return (
            "grep -q 'written by fp8fleet' /etc/nginx/nginx.conf 2>/dev/null && "
            "{ systemctl is-active nginx.service || systemctl is-enabled nginx.service; } "
            ">/dev/null 2>&1 && echo runs || true"
        )

    @staticmethod
    def default() -> bool:
        return False

    def process(self, output: list[str]) -> bool:
        return "runs" in output
