"""From a bare host to a served, proven model; run again, it changes only what is not so."""

from roles import accept, conda, host, kysec, lock, model, nginx, preflight, selinux, vllm

lock.hold()
preflight.check()
host.prepare()
selinux.enforce()
kysec.trust()
conda.install()
model.install()
vllm.serve()
nginx.proxy()
vllm.retire()
accept.prove()
selinux.audit()
