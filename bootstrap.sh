#!/bin/sh
# Makes the development environment VENV from locks/dev.txt, with any CPython 3.10 or newer.
# usage: sh bootstrap.sh VENV
set -eu

venv=$1
ready="$venv/ready"

say() { printf '%s\n' "$*"; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
    for candidate in "${PYTHON:-}" python3 /usr/bin/python3; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "error: no CPython 3.10 or newer found; install python3, or set PYTHON to one" >&2
    exit 2
}

install_venv_module() {
    command -v apt-get >/dev/null || {
        say "error: $1 has no venv module and this machine no apt-get: install it by hand" >&2
        exit 2
    }
    say "installing python3-venv"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install python3-venv
}

if ! command -v "${PYTHON:-python3}" >/dev/null && command -v apt-get >/dev/null; then
    install_venv_module python3
fi
python=$(find_python)
"$python" -c 'import ensurepip, venv' 2>/dev/null || install_venv_module "$python"

say "making $venv with $("$python" --version) ($python)"
rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --require-hashes -r locks/dev.txt
"$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
touch "$ready"
