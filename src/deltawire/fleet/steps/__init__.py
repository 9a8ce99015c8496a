"""The work of trainer and members, as generators that yield requests. The same code runs over a real store and in the simulation.

requests           what steps ask for, and what runs them over a real store
signal             tells steps of one process that others have changed something
coordinator_steps  the trainer: open rounds, poll, collect, reject, stop
trainer_context    what all steps of one trainer share, and whether another trainer has taken over
round_steps        the trainer opens rounds, and adopts those of earlier trainers
intake_steps       the trainer reads heartbeats, leases and results, and judges the results
board_steps        the trainer writes the board
batch_steps        the trainer acknowledges batches, and rejects results after that
live_steps         the trainer does the live tasks of its rounds
record_steps       the records that trainers leave in the store: read, write, delete
claim_steps        a member claims tasks
work_steps         a member works on its tasks, and uploads the results
member_state       what all steps of one member share, and its heartbeats
"""
