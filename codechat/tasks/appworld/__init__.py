"""AppWorld (arXiv:2407.18901) over HTTP, and its successful episodes as SFT data."""
