"""The engine below PyTorch: its start, its groups and operations, and their errors."""
