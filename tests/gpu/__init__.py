"""Checks of CUDA tensors, on a GPU (`python -m tests.gpu`) and on a fake of one (tests/process/test_cuda.py)."""
