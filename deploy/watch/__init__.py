"""`penstock watch`: a run in the terminal. Imported through `command`."""
