"""From a bare host to a served, proven model; run again, it changes only what is not so."""

from roles import (
    accept,
    cmake,
    conda,
    driver,
    firewall,
    host,
    kysec,
    lock,
    model,
    nginx,
    preflight,
    selinux,
    vllm,
)

lock.hold()
preflight.check()
host.prepare()
driver.install()
firewall.guard()
host.settle()
selinux.enforce()
kysec.trust()
cmake.install()
conda.install()
model.install()
vllm.serve()
nginx.proxy()
vllm.retire()
firewall.close()
accept.prove()
selinux.audit()
