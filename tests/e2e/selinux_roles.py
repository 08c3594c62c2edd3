"""The part of deploys/full.py that SELinux has a say in, for runs that change nothing else."""

from roles import accept, nginx, selinux

selinux.enforce()
nginx.proxy()
accept.prove()
selinux.audit()
