"""Environments that come with the project; a run file names these and others by import path.

The demo's models learn their format from lessons of `arithmetic.Arithmetic`, `calculator.Calculator` and
`pictures.DrawnShapes`.
"""
