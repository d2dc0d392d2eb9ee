"""Character models: a text learned letter by letter, with supervised learning, GRPO, PPO or
denoising."""
