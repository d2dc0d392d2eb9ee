"""The embedded conversations, rows of public data sets, prepared directories, and downloads."""
