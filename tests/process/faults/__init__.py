"""Faults, on real processes: each gives the documented error on every survivor in the documented time.

`docs/faults.md` says what happens; the modules here make it happen. Every case is noted with its time in
`out/faults.json`, and `python -m tests.process.faults` prints them as a table.
"""
