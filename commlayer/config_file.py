"""`ConfigFile`: the file of settings that a job reads, commlayer.toml.

It is the file that COMMLAYER_CONFIG names, or commlayer.toml in the folder in which the job was started. Only TOML and
the names of the sections are known here; `config.py` has the settings.

A job must not take settings from a stranger, who could turn `auth` off: a file that nobody has named is refused if it
belongs to another user, or if every user may write it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import commlayer_environment

from .errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = commlayer_environment.CONFIG

LARGEST_BYTES = 65536


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """The contents of a file of settings."""

    path: str = ""
    """Empty: there is none."""
    sections: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)


def of_job(environ: Mapping[str, str]) -> ConfigFile:
    """The file that this process reads; it is read once.

    Raises ConfigError if it cannot be read, is no TOML, or is not to be trusted.
    """
    named = environ.get(VARIABLE, "").strip()
    return _once(commlayer_environment.path_of_file(named), bool(named))


@functools.cache
def _once(path: str, is_named: bool) -> ConfigFile:
    return read(path) if is_named else ConfigFile() if not Path(path).exists() else read(path, is_named=False)


def read(path: str, *, is_named: bool = True) -> ConfigFile:
    """The contents of a file. `is_named`: somebody has named it. Raises ConfigError as `of_job` does."""
    try:
        content = tomllib.loads(_text(path, is_named))
    except OSError as error:
        remedy = f"name a file of settings with {VARIABLE} or --check" if is_named else "make it a file to read"
        raise ConfigError(f"{path}: {error.strerror}; {remedy}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}; fix that line, or see docs/settings.md") from None
    for name, entries in content.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: {name} = {entries!r}: settings belong to a section; put [process] above it")
    return ConfigFile(path, content)


def _text(path: str, is_named: bool) -> str:
    """The text of a file. Of a device or a pipe, which might never end, nothing is read."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST_BYTES:
            raise ConfigError(f"{path}: not a file of at most {LARGEST_BYTES} bytes; name a file of settings")
        if not is_named and (about.st_uid not in (0, os.geteuid()) or about.st_mode & stat.S_IWOTH):
            fault = "every user may write it" if about.st_mode & stat.S_IWOTH else f"it belongs to user {about.st_uid}"
            raise ConfigError(
                f"{path}: {fault}, and a stranger's settings could expose the job; if you trust it, name it with "
                f"{VARIABLE}={path}, otherwise remove it"
            )
        return file.read(LARGEST_BYTES + 1).decode()
