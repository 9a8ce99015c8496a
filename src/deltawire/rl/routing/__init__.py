"""The routing of MoE models: recorded experts in place of those that a model chooses.

router_replay     replays recorded experts in a model
replayed_rows     the experts that are replayed, and since when
router_weights    how routers weight the experts that they chose
routing_recorder  records the experts of a transformers model while it generates
trl_replay        replay in TRL's AsyncGRPO trainer
router_export     recorded experts for other trainers
"""
