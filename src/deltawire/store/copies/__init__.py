"""Copies of a chain: a reader reads from them and from the origin as if they were one store.

locations       open the store of a chain, or several of them
sources         the origin and copies of it as one store
copy_choice     the copies that a reader asks
copy_state      what a reader knows about one copy
source_options  how a reader uses copies
"""
