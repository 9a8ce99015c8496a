"""Reinforcement learning on a fleet: sampling, rewards, the GRPO loss, and a small trainer. Needs torch and transformers."""
