"""The Berkeley Function Calling Leaderboard, single turn."""
