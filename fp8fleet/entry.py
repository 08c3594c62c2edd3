"""The fp8fleet command: what hosts run too is run as hosts run it, all else by `fp8fleet.cli`.

Loading pyinfra replaces the standard library's threads by ones that share a core (gevent), and
takes a second; hashing and downloading want neither.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit: 0 fine, 1 a failed check, 2 a wrong input, 130 interrupted."""
    try:
        from fp8fleet.output import leave

        code = _run(sys.argv[1:])
    except KeyboardInterrupt:
        # While it was loaded; `fp8fleet.output.run` takes care of all others.
        sys.exit(130)
    leave(code)


def _run(arguments: list[str]) -> int:
    from fp8fleet import hostcli

    if (arguments[:1] and arguments[0] in hostcli.COMMANDS) or arguments[
        :2
    ] == hostcli.TORRENT_COMMAND:
        return hostcli.main(arguments)
    from fp8fleet import cli

    return cli.main(arguments)
