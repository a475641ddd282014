"""The table of orders in docs/planner.md is the one that the model gives."""

from bench.pipeline_orders import PAGE, table


def test_the_page_has_the_models_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
