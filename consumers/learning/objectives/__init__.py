"""Objectives: pure functions of tensors, one file each, opened by formula, source and departures from the paper."""
