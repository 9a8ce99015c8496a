"""The chain of versions as readers and writers see it: its log, ways through it, and what may be deleted (docs/protocol.md)."""
