"""The laboratory: benchmarks, experiments and the check of the containers. Runs from a checkout; nothing is installed.

`python -m bench` measures the sections, folders with a `section` module, with what `section` and `result` have;
`bench.gpu`, `bench.sizing`, `bench.study` and `bench.compose_check` are programs of their own.
"""
