"""Shortcuts through the chain, made after a commit: anchors and skips (docs/protocol.md §4).

cadence          when another anchor is worth its upload
compose          one delta over several versions
shortcut_writer  uploads and records anchors and skips
upkeep           what happens after each commit: shortcuts and garbage collection
job_thread       the thread on which that happens
made_shortcuts   what the thread has made, for the thread that publishes
"""
