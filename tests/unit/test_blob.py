"""Values packed as one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import CommError
from commlayer.transport.blob import pack, unpack


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_values_come_back(values: list[bytes]) -> None:
    assert unpack(pack(values)) == values


def test_like_values_shrink() -> None:
    values = [b'{"host": "0123456789abcdef", "port": %d}' % number for number in range(1000)]
    assert len(pack(values)) < sum(map(len, values)) / 8


@pytest.mark.parametrize("damaged", [b"", b"nothing", pack([b"a"])[:-4], pack([b"a"])[2:]])
def test_what_is_no_blob_is_refused(damaged: bytes) -> None:
    with pytest.raises(CommError, match=r"damaged.*install the same version on all ranks"):
        unpack(damaged)
