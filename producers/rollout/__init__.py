"""From a prompt to a scored group: `episode.Episodes` poses, `sampling` samples, `rewards` scores. `probe` does the
same without a stream, for the parity check.
"""
