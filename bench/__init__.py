"""The laboratory: benchmarks, the study of corrections, the check of the containers. Runs from a checkout alone.

`python -m bench` measures the sections, folders with a `section` module, with what `section`, `running` and `result`
have; `bench.sizing`, `bench.study` and `bench.compose_check` are programs of their own.
"""
