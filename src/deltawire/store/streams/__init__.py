"""How much a store transfers at the same time.

stream_limit   how many transfers run at the same time
stream_ramp    how that number grows on a new link
known_links    that number, for the next store at the same location
link_estimate  the measured link to a store
rate_limit     bytes and requests per second that the user allows
"""
