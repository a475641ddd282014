"""Files in TOML that a user gives to a command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def read(path: Path, of: Callable[[dict[str, Any]], T]) -> T:
    """`of` of the content of a file. Raises ConfigError, with the file's name, for a file that cannot be read or is not
    TOML, and in place of a ValueError or a ConfigError of `of`."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    try:
        return of(content)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
