"""The fp8fleet command: what hosts run too is run as hosts run it, all else by `fp8fleet.cli`.

Loading pyinfra replaces the standard library's threads by ones that share a core (gevent), and
takes a second; hashing and downloading want neither.
"""

from __future__ import annotations

import sys

from fp8fleet import hostcli


def main() -> int:
    """Run the command line; returns its exit code: 0 fine, 1 a failed check, 2 a wrong input."""
    arguments = sys.argv[1:]
    if (arguments[:1] and arguments[0] in hostcli.COMMANDS) or arguments[
        :2
    ] == hostcli.TORRENT_COMMAND:
        return hostcli.main(arguments)
    from fp8fleet import cli

    return cli.main(arguments)
