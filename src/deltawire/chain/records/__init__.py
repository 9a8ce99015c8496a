"""The records of a chain, as readers find them in the store.

record_reader     reads single records, and checks each by itself
file_lists        the files of commits and shortcuts
announcements     files of the next version that are uploaded before its commit exists
canaries          what a healthy engine generates with a version
pins              records that keep objects from collection
reports           records of what engines serve
published_relays  where relays keep copies of the chain
"""
