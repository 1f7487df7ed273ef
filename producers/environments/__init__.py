"""Environments that come with the project; others are named in a run file by import path, as these are.

The demo's models learn their format from lessons of `arithmetic.Arithmetic` and `calculator.Calculator`.
"""
