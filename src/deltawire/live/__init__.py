"""Live traffic: what users got, what they said about it, and whether a canary is good enough. Does not import torch.

gate              watches a canary, decides, writes evidence and moves a channel
gate_rules        decides whether a canary is promoted or rolled back
gate_traffic      the answers and the feedback that a gate compares
gate_records      reads and writes the evidence of gates
sequential_test   compares two groups of answers while they arrive
traffic_reader    reads new files of interactions and feedback
declared_metrics  reads which metrics are declared
send              sends feedback to a gateway
"""

from .send import send_feedback

__all__ = ["send_feedback"]
