"""`penstock watch`: what a run does, in a terminal."""
