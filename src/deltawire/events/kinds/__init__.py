"""The kinds of events: one file for each part of the library.

kind        what describes a kind of event: its level, and its fields with their types and units
fields      the fields that several kinds share
publishers  events of publishers
readers     events of readers
relays      events of relays, and of readers that have several stores
engines     events of engines
trainers    events of trainers with a fleet
members     events of members of a fleet
gateways    events of gateways
gates       events of gates, which judge canaries
store       events that `deltawire events` makes from the store alone
"""
