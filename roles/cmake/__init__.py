"""cmake: one that is new enough, for hosts that build what has no wheel."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.cmake.operations import cmake


@deploy("CMake")
def install() -> None:
    """Install cmake from an archive where a source build is planned and the host's is too old."""
    plan = host_plan(host)
    cmake(name="cmake for source builds", plan=plan)
