"""`penstock inspect`: a run's rollouts, token by token, in a browser. Imported through `command`."""
