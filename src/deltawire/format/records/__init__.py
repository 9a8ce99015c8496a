"""The small records in the store, in canonical form (docs/protocol.md §2, §10).

canonical      JSON with one spelling
record_parts   references, files, signatures and limits that records are made of
record_rules   how the fields of one record must fit together
chain_records  the records of a chain
fleet_records  the records of a fleet
fleet_files    the trainer's larger files for a fleet
signing        Ed25519 signatures
"""
