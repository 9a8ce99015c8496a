"""The kinds of events: one file for each part of the library, `fields.py` for the fields that several kinds share."""
