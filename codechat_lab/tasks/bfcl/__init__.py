"""The Berkeley Function Calling Leaderboard: single turns, whose calls are compared with possible
answers, and several turns with simulated systems, which are an environment too."""
