"""Judge the hosts and write the reports; nothing is changed."""

from roles import preflight

preflight.check()
