"""Routes: the hops that lead from a state to a version.

plan              the cheapest route through known hops
restore           find the hops that a chain offers, and the cheapest route
remaining_routes  routes that avoid hops which failed
walk_route        take the hops of a route, and try another route after a failure
rebuild           bring a state in memory to a version
"""
