"""lock: one run at a time on a host; the lock ends with the run, however that ends."""

from pyinfra.api.deploy import deploy

from roles.lock.operations import hold_lock


@deploy("Lock")
def hold() -> None:
    """Hold the host's lock until this run ends."""
    hold_lock(name="One run at a time")
