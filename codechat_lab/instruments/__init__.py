"""What the laboratory looks with: token x-rays, exact gradients, reward starts, natural requests, the planner."""
