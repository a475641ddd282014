"""Prints the cases of the last run of the fault tests as a table in Markdown."""

import json

from .scene import NOTES

cases = {(note["fault"], note["site"]): note for note in map(json.loads, NOTES.read_text().splitlines())}
print("| fault | ranks on | survivors get | noticed after | documented |")
print("|---|---|---|---|---|")
for (fault, site), case in sorted(cases.items()):
    took = f"{1000 * case['seconds']:.0f} ms" if case["seconds"] < 1 else f"{case['seconds']:.2f} s"
    limit = "" if case["limit_s"] is None else f"{case['limit_s']:g} s"
    print(f"| {fault} | {site} | {', '.join(case['errors'])} | {took} | {limit} |")
