"""The small records in the store, in canonical form (docs/protocol.md §2, §10).

canonical           JSON with exactly one spelling, and the base of the chain's records
record_parts        references, files, signatures and limits that records are made of
record_rules        how the fields of one record must fit together
run_records         what the chain is, who writes it, and how far it goes: Run, Epoch, Head
version_records     its versions: Commit, Shortcut
collection_records  which data may be deleted: Mark, Pin
fleet_parts         parts that the records of a fleet share
trainer_records     the records that a trainer writes for its fleet
member_records      the records that members of a fleet write
fleet_files         the trainer's larger files for a fleet
signing             Ed25519 signatures
"""
