"""Looking after a chain as a whole: what is damaged, and what can be deleted.

survey      all objects of a chain, and which of them are needed
verify      checking every object
superseded  damage that no reader of the newest version meets
collect     garbage collection
"""
