"""The Berkeley Function Calling Leaderboard, single turn: calls are compared with the possible
answers. Evaluation only."""
