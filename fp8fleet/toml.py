"""TOML reading with an operator's error messages, on every supported Python."""

import sys
from pathlib import Path
from typing import Any

from fp8fleet.errors import OperatorError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse ``text``; ``where`` names it in errors.

    Raises:
        OperatorError: not TOML, with the parser's line and column.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise OperatorError(f"{where}: not TOML: nested too deep") from None
    except ValueError as error:
        # The parser's own error, or Python's of a number with thousands of digits.
        raise OperatorError(f"{where}: not TOML: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        OperatorError: the file is missing, unreadable, not UTF-8 or not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OperatorError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path}: cannot be read: {error}") from None
    return parse_toml(text, str(path))
