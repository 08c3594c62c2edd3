"""Having Nginx serve the configuration that lies on the disk."""

from __future__ import annotations

from collections.abc import Iterator

from pyinfra import host
from pyinfra.api import StringCommand, operation

from fp8fleet.plan import ProxyPlan
from roles.nginx.facts import Nginx, OurNginxRuns

_DENIED = r"s/.*bind() to [^ ]*:\([0-9]*\) failed (13: Permission denied).*/\1/p"
_EXPLAINED = (
    "{ echo 'Nginx does not serve the new configuration; its error log says:'; "
    "tail -n 3 /var/log/nginx/error.log; "
    f"p=$(tail -n 3 /var/log/nginx/error.log | sed -n '{_DENIED}' | tail -n 1); "
    '[ -z "$p" ] || [ "$(cat /sys/fs/selinux/enforce 2>/dev/null)" != 1 ] || '
    'echo "SELinux denies Nginx port $p: the port needs the label http_port_t, which'
    " selinux = 'enforcing' sets (by hand: semanage port -a -t http_port_t -p tcp $p,"
    ' or -m in place of -a)"; } >&2; exit 1;'
)
"""Says why Nginx does not serve, and fails."""


@operation()
def live_configuration(proxy: ProxyPlan | None) -> Iterator[StringCommand]:
    """Start or reload Nginx where it does not serve the planned configuration; prove that it does.

    `nginx -s reload` succeeds even when the workers could not take the new configuration (a port
    that is in use, a denied bind), so that only Nginx's own answer counts.

    A host without a planned proxy keeps no Nginx of ours: a gateway has taken over.
    """
    if proxy is None:
        if host.get_fact(OurNginxRuns):
            yield StringCommand("systemctl disable --now --quiet nginx.service")
        return
    state = host.get_fact(Nginx, status_port=proxy.status_port)
    if not state.enabled:
        yield StringCommand("systemctl enable --quiet nginx.service")
    if state.active and state.digest == proxy.digest:
        return
    if state.active:
        yield StringCommand("systemctl reload nginx.service")
    else:
        yield StringCommand(f"systemctl restart nginx.service || {{ {_EXPLAINED} }}")
    yield StringCommand(_wait_until_live(proxy))


def _wait_until_live(proxy: ProxyPlan) -> str:
    live = f"curl -s --max-time 2 --noproxy '*' http://127.0.0.1:{proxy.status_port}/live"
    return (
        f'for i in $(seq 20); do [ "$({live})" = {proxy.digest} ] && exit 0; sleep 0.5; done; '
        f"{_EXPLAINED}"
    )
