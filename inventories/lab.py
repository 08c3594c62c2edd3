"""The lab's hosts on this machine (`fp8fleet lab up`): a site without a route out, its mirror."""

from lab import site as _lab

_site = _lab.site()

_data = {
    "ssh_user": "root",
    "ssh_key": str(_lab.client_key()),
    "ssh_known_hosts_file": str(_lab.known_hosts()),
    "platform": "debian-12",
    "accelerator": "cpu",
    # The same keys that a real site without internet uses.
    "apt_sources": [f"deb [trusted=yes] {_site.debian_url} ./"],
    "conda_frontend_url": _site.frontend_url,
    "conda_frontend_sha256": _site.frontend_sha256,
    "conda_channels": [_site.channel_url],
    "package_find_links": [_site.wheels_url],
    # Only hosts that build from source take it.
    "cmake_archive_url": _site.cmake_url,
    "cmake_sha256": _site.cmake_sha256,
    # vLLM's CPU build and a tiny model with random weights.
    "engine_release": "0.32.0",
    "engine_python": "3.11",
    "engine_requirements": "locks/vllm-0.32.0-cpu-x86_64.txt",
    "engine_pins": ["pydantic==2.14.4"],
    # One process a server and no compilation: a start on two cores takes seconds, not a minute.
    "engine_environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "model_manifest": "models/tiny-llama/manifest.toml",
    "warm_up_concurrency": 4,
    "start_timeout": 600,
    "drain_timeout": 30,
    "instances": [
        {
            "name": "tiny",
            "port": 8000,
            "options": {
                "dtype": "bfloat16",
                "max-model-len": 1024,
                "max-num-seqs": 16,
                "enforce-eager": True,
                "distributed-executor-backend": "uni",
                "kv-cache-memory-bytes": 64 * 1024 * 1024,
            },
        },
    ],
}

# RPM hosts call themselves Kylin V10, whose C library the wheels of this release are too new for
# (theirs is Debian's in truth): only a release built on the host is planned there.
_kinds = {
    "debian": {},
    "rpm": {
        "platform": "kylin-v10",
        "engine_build": "source",
        "dnf_repositories": [
            {"name": "lab", "base_url": f"{_site.mirror_url}/rpm", "gpgcheck": False}
        ],
    },
}

serving = (
    [(host.name, {"ssh_hostname": host.address, **_kinds[host.family]}) for host in _site.hosts],
    _data,
)
