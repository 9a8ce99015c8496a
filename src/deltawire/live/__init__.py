"""Live traffic: what users got, what they said about it, and whether a canary is good enough. Does not import torch.

gate_rules        decides whether a canary is promoted or rolled back
sequential_test   compares two groups of answers while they arrive
"""
