"""`penstock watch`: a run in the terminal. Imported through `command`; `penstock plan` uses `waited_for` of `flow`, and
`text`."""
