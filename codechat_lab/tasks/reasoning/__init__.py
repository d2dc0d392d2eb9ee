"""Questions with one answer: GSM8K, generated word problems, multiple choice."""
