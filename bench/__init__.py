"""The laboratory: benchmarks, experiments and the check of the containers. Runs from a checkout; nothing is installed.

`python -m bench` measures the sections (`pipeline`, `stream`, `head`, `endpoint`) with what `section` and `result`
have; `python -m bench.gpu`, `bench.experiments` and `bench.compose_check` are programs of their own.
"""
