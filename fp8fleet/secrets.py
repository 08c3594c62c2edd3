"""References to secrets: an inventory names where a secret is, only a deploy reads it."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from fp8fleet.errors import OperatorError

_FORMS = "expected env:VARIABLE or file:/absolute/path (a reference, never the secret itself)"


@dataclass(frozen=True)
class SecretRef:
    """Where a secret is: an environment variable or a file with mode 0600.

    The object holds the reference only, so that no repr, dump or traceback can show the secret.
    In pydantic models and in inventories it is written as ``env:NAME`` or ``file:/path``.
    """

    kind: Literal["env", "file"]
    name: str

    @classmethod
    def parse(cls, text: str) -> SecretRef:
        """Read ``env:NAME`` or ``file:/path``.

        Raises:
            ValueError: another form. The text is not repeated: it may be a pasted secret.
        """
        kind, _, name = text.partition(":")
        if kind == "env" and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            return cls("env", name)
        if kind == "file" and re.fullmatch(r"/[\w./@+-]+", name):
            return cls("file", name)
        raise ValueError(_FORMS)

    @property
    def placeholder(self) -> str:
        """What plans and rendered files show in the secret's place."""
        return f"<secret {self.name}>"

    def resolve(self) -> str:
        """Read the secret.

        Raises:
            OperatorError: unset, missing, readable by others, empty or more than one line.
        """
        secret = self._from_environment() if self.kind == "env" else self._from_file()
        if not secret:
            raise OperatorError(f"{self}: the secret is empty")
        # The value becomes one line of an environment file or of an HTTP header.
        if not (secret.isascii() and secret.isprintable()):
            raise OperatorError(
                f"{self}: the secret must be one line of printable ASCII characters"
            )
        return secret

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    def _from_environment(self) -> str:
        if self.name not in os.environ:
            raise OperatorError(
                f"{self}: the environment variable {self.name} is not set: export it"
            )
        return os.environ[self.name].strip()

    def _from_file(self) -> str:
        path = Path(self.name)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o177:
                raise OperatorError(
                    f"{self}: the file has mode {mode:04o}, expected 0600 or stricter:"
                    f" chmod 600 {self.name}"
                )
            return path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise OperatorError(f"{self}: no such file") from None
        except UnicodeDecodeError:
            raise OperatorError(f"{self}: the secret must be printable text") from None
        except OSError as error:
            raise OperatorError(f"{self}: cannot be read: {error.strerror}") from None

    @classmethod
    def _validate(cls, value: object) -> SecretRef:
        if isinstance(value, SecretRef):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        raise ValueError(_FORMS)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            json_schema_input_schema=core_schema.str_schema(),
            serialization=core_schema.to_string_ser_schema(),
        )
