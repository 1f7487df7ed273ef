"""Objectives: pure functions of tensors, one per file, which opens with formula, source and departures from the paper.

A run file names one by its import path; they share `terms` and `clip`.
"""
