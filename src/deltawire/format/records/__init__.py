"""The small records in the store, in canonical form (docs/protocol.md §2, §10).

canonical             JSON with exactly one spelling, and the base of the chain's records
record_parts          references, files, signatures and limits that records are made of
record_rules          how the fields of one record must fit together
run_records           what the chain is, who writes it, and how far it goes: Run, Epoch, Head
version_records       its versions: Commit, Shortcut
file_list             the files of a version with more of them than a record has room for
announcement_records  files of the next version, before its commit exists
canary_records        what a healthy engine generated with a version
channel_records       moves of channels
gate_records          what a gate found about a canary, and what it decided
relay_records         where copies of the chain are
collection_records    which data may be deleted: Mark, Pin
fleet_parts           parts that the records of a fleet share
trainer_records       the records that a trainer writes for its fleet
member_records        the records that members of a fleet write
fleet_files           the trainer's larger files for a fleet
live_records          what feedback means, and how it becomes a reward
used_records          which interactions rounds have used
signing               Ed25519 signatures
"""
