"""What the training loops share: settings, the session of a run, metrics. The algorithms are in
the loops at the top of the package."""
