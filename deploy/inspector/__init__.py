"""`penstock inspect`: a run's rollouts, looked at token by token in a browser."""
