"""Live traffic: what users got, what they said about it, and whether a canary is good enough. Does not import torch.

>>> traffic = LiveTraffic("s3://bucket/run", metrics=[Metric("thumbs", window=3600, default=0.0)])
>>> for joined in traffic.ripe():      # answers that have their rewards
...     print(joined.pending.id, joined.reward)

traffic           joins answers and feedback, for trainers and people
rules             decides what an answer's reward is, without I/O
steps             reads and writes live traffic, without I/O
gate              watches a canary, decides, writes evidence and moves a channel
gate_rules        decides whether a canary is promoted or rolled back
gate_traffic      the answers and the feedback that a gate compares
gate_records      reads and writes the evidence of gates
sequential_test   compares two groups of answers while they arrive
traffic_reader    reads new files of interactions and feedback
declared_metrics  reads which metrics are declared
send              sends feedback to a gateway
"""

from ..format.records.live_records import Metric
from .rules.join import Joined, Pending
from .send import send_feedback
from .steps.joiner_steps import JoinerOptions, Judge
from .traffic import LiveTraffic

__all__ = ["Joined", "JoinerOptions", "Judge", "LiveTraffic", "Metric", "Pending", "send_feedback"]
