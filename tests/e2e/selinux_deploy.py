"""deploys/full.py without environments and models: an emulated machine would take hours."""

from roles import accept, host, lock, nginx, preflight, selinux

lock.hold()
preflight.check()
host.prepare()
selinux.enforce()
nginx.proxy()
accept.prove()
selinux.audit()
