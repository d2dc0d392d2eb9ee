"""Questions with one answer: GSM8K, MMLU and generated word problems."""
