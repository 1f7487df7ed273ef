"""`penstock watch`: a run in the terminal. Imported through `command`; `penstock plan` has the rule of `flow` and its
`text`."""
