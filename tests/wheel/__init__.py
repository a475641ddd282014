"""The wheel in a clean environment: `python -m tests.wheel WHEEL`."""
