"""The host's packages and its firewall alone: what the firewall's tests run many times."""

from roles import firewall, host, lock

lock.hold()
host.prepare()
firewall.guard()
firewall.close()
