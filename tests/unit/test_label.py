"""The names that operations have in traces."""

from __future__ import annotations

from commlayer.frontend.work.label import current_label, labelled


def test_the_outermost_name_counts() -> None:
    """A pipeline names a segment, whose gradients then travel as a bucket."""
    assert current_label() == ""
    with labelled("segment 1 of stage 0"):
        with labelled("bucket 0"):
            assert current_label() == "segment 1 of stage 0"
        assert current_label() == "segment 1 of stage 0"
    with labelled("bucket 1"):
        assert current_label() == "bucket 1"
    assert current_label() == ""
