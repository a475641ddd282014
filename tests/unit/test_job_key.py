from pathlib import Path

import pytest

from commlayer.errors import ConfigError
from commlayer.tools.job_key import job_key
from commlayer.transport.secret import mixed, read_secret

KEY = bytes(range(16))


def test_a_key_is_that_of_the_store_unless_a_secret_is_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMMLAYER_SECRET_FILE", raising=False)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    both = mixed(KEY, read_secret(str(secret)))
    assert job_key(KEY.hex().upper(), None) == KEY != both
    assert job_key(KEY.hex(), secret) == both
    monkeypatch.setenv("COMMLAYER_SECRET_FILE", str(secret))
    assert job_key(KEY.hex(), None) == both


def test_errors_name_the_key_or_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--key 'abc': use 32 hex digits"):
        job_key("abc", None)
    with pytest.raises(ConfigError, match=f"{tmp_path}/none: No such file"):
        job_key(KEY.hex(), tmp_path / "none")
