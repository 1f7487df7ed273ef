"""Benchmarks, and the peers they compare with."""
