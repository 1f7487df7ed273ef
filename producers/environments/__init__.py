"""Environments that come with the project; others are named in a run file by import path."""
