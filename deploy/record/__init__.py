"""`penstock record export`: a run's record as a Parquet file.

Imported through `command`; from Python through `reading`.
"""
