"""Errors that speak to an operator: one line, with the exit code of the command line."""


class OperatorError(Exception):
    """An input that cannot mean anything: what was found, where, what is expected, what to do.

    The command line prints it as one line, without a traceback, and exits with ``exit_code``.
    """

    exit_code = 2


class CheckFailed(OperatorError):
    """A check or a host failed although the input was right."""

    exit_code = 1
