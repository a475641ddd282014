"""The secret that is not in the Store."""

from pathlib import Path

import pytest

from commlayer.errors import ConfigError
from commlayer.transport.secret import fingerprint, mixed, read_secret

KEY = bytes(range(16))
SECRETS = [b"", b"a" * 32, b"b" * 32]


def test_a_secret_changes_the_key() -> None:
    keys = {mixed(KEY, secret) for secret in SECRETS}
    assert len(keys) == 3
    assert KEY in keys  # without a secret
    assert all(len(key) == 16 for key in keys)
    assert mixed(bytes(16), SECRETS[1]) not in keys


def test_fingerprints_differ_between_secrets_and_processes() -> None:
    found = {fingerprint(secret, life) for secret in SECRETS[1:] for life in ("one", "two")}
    assert len(found) == 4
    assert fingerprint(b"", "one") == ""


def test_a_file_that_others_may_read_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRETS[1])
    path.chmod(0o600)
    private = read_secret(str(path))
    assert caplog.messages == []
    path.chmod(0o644)
    assert [read_secret(str(path)) for _ in range(2)] == [private] * 2
    assert caplog.messages == [f"COMMLAYER_SECRET_FILE={path}: every user of this host may read it; chmod 600 it"]


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRETS[1])
    path.chmod(0o606)
    with pytest.raises(ConfigError, match="every user may write it, and so choose the secret; chmod 600 it"):
        read_secret(str(path))


@pytest.mark.parametrize(("path", "why"), [("/dev/zero", "it has 0 bytes"), ("/dev", "Is a directory")])
def test_what_is_no_file_is_refused_unread(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"COMMLAYER_SECRET_FILE={path}: {why}"):
        read_secret(path)
