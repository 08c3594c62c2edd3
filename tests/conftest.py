"""For all tests: pyinfra patches the standard library, so it comes before all else."""

import pyinfra_cli  # noqa: F401
