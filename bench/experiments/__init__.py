"""Experiments: many short trainings (cells), a result file for each, figures and tables of them on a page.

`experiment` has what an experiment defines, `command` runs one; `bench.study` and `bench.ablation` are the two that
there are.
"""
