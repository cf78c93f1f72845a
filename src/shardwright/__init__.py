"""Shardwright: automatic model parallelism for PyTorch."""
