"""Tests by cost: `unit` needs neither engine, socket nor process; `engine` runs it with threads as ranks; `process`
starts the ranks as processes; `emulated` needs root, for network namespaces; `torch_suite` is PyTorch's own suite.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
