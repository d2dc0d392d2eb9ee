"""What the laboratory looks with: token x-rays, contamination, exact gradients, reward starts,
natural requests, the planner."""
