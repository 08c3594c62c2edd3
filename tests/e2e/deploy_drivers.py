"""The host's packages and its drivers alone: lab hosts have no accelerator to serve with."""

from roles import driver, host, lock

lock.hold()
host.prepare()
driver.install()
