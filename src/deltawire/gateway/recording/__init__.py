"""The recording of answers: from an answer to a file of interactions in the store.

recorder.py        records answers: journal first, then the store
inline_answers.py  takes token ids and log-probs out of an answer that has them inside
answer_queues.py   asks engines what they drew
answer_text.py     reads what a caller got: text, refusals and tool calls
answers.py         turns an answer into interactions
redaction.py       asks the user's function for redaction
row_thread.py      the thread on which interactions are made and written
journal.py         keeps interactions on disk until the store has them
journal_log.py     the operations of a journal on the disk, and its logs
uploads.py         makes files of interactions, and puts them into the store
known_ids.py       knows which interactions and episodes exist
id_log.py          keeps the ids of a gateway's own interactions on disk
"""
