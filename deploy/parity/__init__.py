"""`penstock parity`: is it the engine or the objective?"""
