"""Objectives: pure functions of tensors, one file each, opened by formula, source and departures from the paper.

A run file names one by its import path; `terms` and `clip` are what they share.
"""
