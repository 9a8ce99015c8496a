"""Rollout work on the store: tasks, leases, results, and who gets how much. Imports no torch."""
