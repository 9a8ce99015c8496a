"""What trainer and members do, as generators that yield requests. The same code runs over a real store and in the simulation.

requests           what steps ask of the world, and what runs them over a real store
coordinator_steps  the trainer: open rounds, write boards, acknowledge batches
intake_steps       the trainer reads heartbeats, leases and results
resume_steps       the trainer reads what earlier trainers left
rejection_steps    the trainer rejects results after it acknowledged them
sweep_steps        the trainer deletes what no trainer needs any more
member_steps       a member: read the board, claim a task, generate, upload
"""
