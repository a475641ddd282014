"""The secret that is not in the Store."""

from __future__ import annotations

from commlayer.transport.secret import fingerprint, mixed

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
