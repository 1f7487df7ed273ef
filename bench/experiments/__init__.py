"""Experiments: many short trainings (cells), a result file for each, figures and tables of them on a page.

`experiment` is the definition of one, `command` runs it; `bench.study` and `bench.ablation` are the two that
there are.
"""
