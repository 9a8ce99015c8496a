"""Check chains, and delete what no reader needs.

verify           check every record and file of a chain
deep_check       the part of that check that rebuilds every version
verify_channels  the part of it that checks channels
verify_report    the result of a check
superseded       which data readers of the newest version need
survey           what a chain holds and what is garbage
collect          delete garbage, with marks
"""
