"""The embedded conversations, downloads, and the command `codechat data`."""
